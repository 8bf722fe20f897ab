/** The branches of a conversation, beside its text. */

import { Bookmark, Columns2, Trash } from "lucide-preact";
import { useState } from "preact/hooks";
import { path, post, type Place, type TreeTurn } from "../api";
import { openAt, type Conversation } from "../conversation";
import { deleteSession, leaving, notifyError } from "../notices";
import { branchNumber, readable } from "../names";
import { IconButton } from "../parts/Icon";
import { link, open } from "../route";
import { file } from "../sessions";
import { useWatched } from "../store";
import { middle, texts } from "../texts";
import { lines, type Line, type Tree } from "../tree";

const WHOLE = 6;
/** Turns of a line that are shown before its middle is folded away. */

export function TreePane({ talk }: { talk: Conversation }) {
  const { value: gone } = useWatched(leaving);
  const tree = talk.tree;
  if (!tree || talk.name === null) return <p class="hint">{texts.tree.empty}</p>;
  const own = new Set(tree.pathOf(talk.name));
  const others = tree.sessions.filter((each) => !gone.has(each.name));
  return (
    <>
      <ul class="branch-list" aria-label={texts.tree.branches}>
        {others.map((each) => (
          <li class={each.name === talk.name ? "current" : undefined}>
            <a href={link({ view: "talk", session: each.name })} aria-current={each.name === talk.name ? "page" : undefined} title={each.name}>
              <span class="branch-number">{branchNumber(each.name) || 1}</span>
              <span class="item-text differs">{differs(tree, each.name, others.map((other) => other.name)) || readable(each.name)}</span>
            </a>
            {each.name !== talk.name && (
              <>
                <a
                  class="icon"
                  aria-label={texts.tree.compareWith(each.name)}
                  title={texts.tree.compareWith(each.name)}
                  href={link({ view: "compare", session: talk.name!, other: each.name })}
                >
                  <Columns2 size={16} aria-hidden="true" />
                </a>
                <IconButton
                  icon={Trash}
                  label={texts.tree.remove(each.name)}
                  onClick={() => deleteSession(each.name, () => void talk.readTree(), () => void talk.readTree())}
                />
              </>
            )}
          </li>
        ))}
      </ul>
      {lines(tree).map((line) => (
        <LineView tree={tree} line={line} own={own} talk={talk} />
      ))}
      {tree.sessions.length < 2 && <p class="hint">{texts.tree.empty}</p>}
    </>
  );
}

const SHOWN = 60;

/** What a branch says that not all of the others do: its first turn that they do not share. */
function differs(tree: Tree, name: string, all: string[]): string {
  const paths = all.filter((other) => other !== name).map((other) => new Set(tree.pathOf(other)));
  const own = tree.pathOf(name).map((id) => tree.turns.get(id)!);
  const first = own.find((turn) => turn.turn > 0 && paths.some((path) => !path.has(turn.id)));
  if (!first) return "";
  const twin = tree.siblings(first.id).some((id) => id !== first.id && tree.turns.get(id)!.said === first.said);
  return middle((twin ? first.reply : first.said) || first.said, SHOWN);
}

interface LineGiven {
  tree: Tree;
  line: Line;
  own: Set<string>;
  talk: Conversation;
}

function LineView({ tree, line, own, talk }: LineGiven) {
  const [whole, show] = useState(false);
  const folded = !whole && line.turns.length > WHOLE;
  const shown = folded ? [...line.turns.slice(0, 2), null, ...line.turns.slice(-2)] : line.turns;
  return (
    <ul class="line">
      {shown.map((turn) =>
        turn === null ? (
          <li>
            <button type="button" class="quiet more" onClick={() => show(true)}>
              {texts.tree.more(line.turns.length - 4)}
            </button>
          </li>
        ) : (
          <TurnItem tree={tree} turn={turn} own={own} talk={talk} />
        ),
      )}
      {line.branches.length > 0 && (
        <li class="fork">
          {line.branches.map((branch) => (
            <LineView tree={tree} line={branch} own={own} talk={talk} />
          ))}
        </li>
      )}
    </ul>
  );
}

function TurnItem({ tree, turn, own, talk }: { tree: Tree; turn: TreeTurn; own: Set<string>; talk: Conversation }) {
  const here = own.has(turn.id);
  const memories = tree.memories.filter((memory) => memory.at === turn.id);
  const go = () => void goTo(talk, tree, turn.id);
  return (
    <li class={here ? "here" : undefined}>
      <button type="button" class="node" aria-current={here ? "true" : undefined} onClick={go}>
        {turn.turn === 0 ? texts.tree.start : nodeText(tree, turn)}
      </button>
      {memories.map((memory) => (
        <button type="button" class="badge" aria-label={texts.tree.wake(memory.label)} title={memory.note} onClick={() => void wake(memory)}>
          <Bookmark size={12} aria-hidden="true" /> {texts.tree.memory(memory.label)}
        </button>
      ))}
    </li>
  );
}

/** What a turn is called in the tree: the message, or where another branch has the same one, the reply to it. */
function nodeText(tree: Tree, turn: TreeTurn): string {
  const twin = tree.siblings(turn.id).some((id) => id !== turn.id && tree.turns.get(id)!.said === turn.said);
  return (twin && turn.reply ? texts.tree.replied(turn.reply) : turn.said || turn.reply) || "…";
}

/** Show a turn: in this conversation, or in the one that has it. */
export async function goTo(talk: Conversation, tree: Tree, id: string): Promise<void> {
  const turn = tree.turns.get(id);
  if (!turn) return;
  const through = tree.pathOf(talk.name!).includes(id) ? talk.name : tree.sessionThrough(id)?.name;
  if (through) {
    if (through === talk.name) talk.reveal(turn.turn);
    else openAt(through, turn.turn);
    return;
  }
  const memory = tree.memoryThrough(id);
  if (memory) await wake(memory);
}

async function wake(memory: Place): Promise<void> {
  try {
    const name = `${memory.label}-${Date.now().toString(36)}`;
    await post(path("memories", "wake"), { name, address: memory.address });
    await file(name, { title: memory.label });
    open({ view: "talk", session: name });
  } catch (error) {
    notifyError(error);
  }
}
