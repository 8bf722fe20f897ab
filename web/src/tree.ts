/** The tree of a conversation: which turns are siblings, who stands where, and how it is laid out. */

import { get, path, query, type Branch, type Place, type TreePage, type TreeTurn } from "./api";

export class Tree {
  readonly turns = new Map<string, TreeTurn>();
  readonly children = new Map<string | null, string[]>();
  readonly sessions: Branch[];
  readonly memories: Place[];

  constructor(turns: TreeTurn[], sessions: Branch[], memories: Place[]) {
    this.sessions = sessions;
    this.memories = memories;
    for (const turn of turns) {
      this.turns.set(turn.id, turn);
      const siblings = this.children.get(turn.parent);
      if (siblings) siblings.push(turn.id);
      else this.children.set(turn.parent, [turn.id]);
    }
  }

  /** The turns that lead to `id`, the start first. */
  pathTo(id: string | undefined): string[] {
    const found: string[] = [];
    for (let at = id && this.turns.get(id); at; at = at.parent === null ? undefined : this.turns.get(at.parent))
      found.push(at.id);
    return found.reverse();
  }

  pathOf(session: string): string[] {
    return this.pathTo(this.sessions.find((each) => each.name === session)?.at);
  }

  siblings(id: string): string[] {
    const turn = this.turns.get(id);
    return turn && turn.parent !== null ? (this.children.get(turn.parent) ?? []) : [id];
  }

  /** The session that was last used of those that a turn is part of. */
  sessionThrough(id: string): Branch | undefined {
    const below = this.below(id);
    return this.sessions
      .filter((each) => below.has(each.at))
      .reduce<Branch | undefined>((best, each) => (best && best.updated >= each.updated ? best : each), undefined);
  }

  /** A memory at a turn or behind it, where no session leads there any more. */
  memoryThrough(id: string): Place | undefined {
    const below = this.below(id);
    return this.memories.find((each) => below.has(each.at));
  }

  private below(id: string): Set<string> {
    const found = new Set([id]);
    // A set that grows while it is walked is walked to its end.
    for (const each of found) for (const child of this.children.get(each) ?? []) found.add(child);
    return found;
  }
}

/** A line of turns that nothing branches off from, and the lines that follow it. */
export interface Line {
  turns: TreeTurn[];
  branches: Line[];
}

export function lines(tree: Tree): Line[] {
  const roots = (tree.children.get(null) ?? []).map((id): Line => ({ turns: [tree.turns.get(id)!], branches: [] }));
  const open = [...roots];
  for (let line = open.pop(); line; line = open.pop()) {
    for (;;) {
      const next: string[] = tree.children.get(line.turns[line.turns.length - 1]!.id) ?? [];
      if (next.length === 1) {
        line.turns.push(tree.turns.get(next[0]!)!);
        continue;
      }
      line.branches = next.map((id) => ({ turns: [tree.turns.get(id)!], branches: [] }));
      open.push(...line.branches);
      break;
    }
  }
  return roots;
}

const PAGE = 1000;
const MOST = 20_000;

export async function loadTree(session: string): Promise<Tree> {
  let page = await get<TreePage>(path("sessions", session, "tree") + query({ limit: PAGE }));
  const { sessions, memories } = page;
  const turns = page.data;
  while (page.has_more && turns.length < MOST) {
    const after = turns[turns.length - 1]!.id;
    page = await get<TreePage>(path("sessions", session, "tree") + query({ limit: PAGE, after }));
    turns.push(...page.data);
  }
  return new Tree(turns, sessions, memories);
}
