/** Draws what there is much of, a few pieces a frame: what is in view first, then outwards from there. */

/** Turns of a group: a browser lays out groups that are not in view as one box each. */
export const GROUP = 20;

/** The most turns, and characters of their text, that are drawn in one frame; one turn always is. */
const TURNS = 4;
const CHARACTERS = 6000;

export interface Undrawn {
  turn: number;
  /** Characters of its text. */
  size: number;
  draw: () => void;
}

/** What one frame draws of all that waits, where `at` is the turn in view. */
export function batch(waiting: Iterable<Undrawn>, at: number): Undrawn[] {
  const nearest = [...waiting].sort((one, other) => Math.abs(one.turn - at) - Math.abs(other.turn - at));
  let size = 0;
  const end = nearest.findIndex((each, count) => (size += each.size) > CHARACTERS && count > 0);
  return nearest.slice(0, Math.min(TURNS, end < 0 ? TURNS : end));
}

/** What waits to be drawn. A frame draws one batch of it, and the next frame the next. */
export class DrawQueue {
  private readonly waiting = new Set<Undrawn>();
  private frame: number | null = null;

  constructor(private readonly inView: () => number) {}

  /** Have it drawn soon, unless what is returned is called before. */
  add(undrawn: Undrawn): () => void {
    this.waiting.add(undrawn);
    this.frame ??= requestAnimationFrame(this.step);
    return () => void this.waiting.delete(undrawn);
  }

  private readonly step = (): void => {
    this.frame = null;
    if (!this.waiting.size) return;
    for (const undrawn of batch(this.waiting, this.inView())) {
      this.waiting.delete(undrawn);
      undrawn.draw();
    }
    if (this.waiting.size) this.frame = requestAnimationFrame(this.step);
  };
}

/** Where a reader is: the turn at the upper edge of what is in view, and how far from the top of the window. */
export interface Place {
  turn: number;
  top: number;
}

export function placeOf(scroller: HTMLElement): Place {
  const edge = scroller.getBoundingClientRect().top;
  // Only of a group that is in view are the turns looked at: those of others would have to be laid out first.
  const group = firstBelow([...scroller.getElementsByClassName("group")], edge);
  const turn = group && firstBelow([...group.children], edge);
  return turn ? { turn: Number(turn.id.slice("turn-".length)), top: turn.getBoundingClientRect().top } : { turn: 0, top: 0 };
}

/** Undo what has moved a place: browsers do so too, but not behind every jump, and not all. Gives what it scrolled to. */
export function keepPlace(scroller: HTMLElement, { turn, top }: Place): number {
  const moved = (document.getElementById(`turn-${turn}`)?.getBoundingClientRect().top ?? top) - top;
  if (Math.abs(moved) >= 1) scroller.scrollTop += moved;
  return scroller.scrollTop;
}

/** The first of elements in a column that reaches below an edge, or the last one. */
function firstBelow(elements: Element[], edge: number): Element | undefined {
  let [from, to] = [0, elements.length - 1];
  while (from < to) {
    const middle = (from + to) >> 1;
    if (elements[middle]!.getBoundingClientRect().bottom > edge) to = middle;
    else from = middle + 1;
  }
  return elements[from];
}
