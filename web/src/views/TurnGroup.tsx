/** Some turns that follow each other, so that a long conversation is a short list of them. */

import { memo } from "preact/compat";
import { useLayoutEffect, useState } from "preact/hooks";
import type { Turn } from "../api";
import type { Conversation } from "../conversation";
import { GROUP, type DrawQueue } from "../drawing";
import type { Tree } from "../tree";
import { TurnView, type Actions } from "./TurnView";

/** The guessed height of a turn, as in style.css. */
const HEIGHT = 14;
/** Turns at the end that are drawn at once: a conversation opens there, and what was just said must not vanish. */
const LAST = 8;

/** Turns by their groups, each under its number: the same one whatever stands before it. */
export function grouped(turns: Turn[]): [number, Turn[]][] {
  const found: [number, Turn[]][] = [];
  for (const turn of turns) {
    const number = Math.floor((turn.turn - 1) / GROUP);
    const last = found[found.length - 1];
    if (last?.[0] === number) last[1].push(turn);
    else found.push([number, [turn]]);
  }
  return found;
}

interface Given {
  talk: Conversation;
  /** The name of the conversation, which may become that of another branch. */
  name: string | null;
  turns: Turn[];
  tree: Tree | null;
  /** The turns that lead to the end of the conversation, by their ids in the tree. */
  own: string[];
  /** The last turn of the conversation, or 0 where it is in another group. */
  last: number;
  busy: boolean;
  actions: Actions;
  queue: DrawQueue;
}

function same(before: Given, now: Given): boolean {
  const { turns, ...others } = now;
  return (
    (Object.keys(others) as (keyof typeof others)[]).every((name) => before[name] === others[name]) &&
    before.turns.length === turns.length &&
    before.turns.every((turn, at) => turn === turns[at])
  );
}

const DrawnGroup = memo(({ talk, turns, tree, own, last, busy, actions, queue }: Given) => (
  <div class="group" style={{ containIntrinsicHeight: `auto ${HEIGHT * turns.length}rem` }}>
    {turns.map((turn) => {
      const id = own[turn.turn];
      const siblings = tree && id ? tree.siblings(id) : [];
      return (
        <TurnView
          key={turn.turn}
          turn={turn}
          told={talk.toldOf(turn.turn)}
          isLast={turn.turn === last}
          busy={busy}
          at={id ? siblings.indexOf(id) + 1 : 0}
          of={siblings.length}
          actions={actions}
          queue={turn.turn > talk.count - LAST ? null : queue}
        />
      );
    })}
  </div>
), same);

/** A group. Buttons of one that is not in view learn later that a reply is being written, or is no more. */
export function TurnGroup(given: Given) {
  const { busy, queue, turns } = given;
  const [shown, show] = useState(busy);
  useLayoutEffect(() => {
    if (shown !== busy) return queue.add({ turn: turns[0]!.turn, size: 0, draw: () => show(busy) });
  }, [shown, busy]);
  return <DrawnGroup {...given} busy={shown} />;
}
