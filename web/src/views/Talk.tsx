/** The conversation: its turns, the reply on its way, and where the next message is written. */

import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { get, path, post, type List, type Message } from "../api";
import { forkAs, openAt, type Conversation, type Pending } from "../conversation";
import { DrawQueue, keepPlace, placeOf, type Place } from "../drawing";
import { notifyError } from "../notices";
import { useWatched } from "../store";
import { middle, texts } from "../texts";
import { Composer } from "./Composer";
import { Dialog } from "./Dialog";
import { Inside } from "./Inside";
import { SettingsDialog } from "./SettingsDialog";
import { goTo, TreePane } from "./TreePane";
import { grouped, TurnGroup } from "./TurnGroup";
import { ReplyBody, Said, type Actions } from "./TurnView";

const NEAR = 80;
/** Pixels from the end within which new text is followed. */

const DRAFT = "perdure-draft/";

/** What is written and not sent, by conversation: it outlasts a reload of the tab. */
export const drafts = {
  get: (name: string) => sessionStorage.getItem(DRAFT + name) ?? "",
  set: (name: string, text: string) => (text ? sessionStorage.setItem(DRAFT + name, text) : sessionStorage.removeItem(DRAFT + name)),
};

let served: Promise<string> | null = null;

/** What the server calls its model. */
function servedModel(): Promise<string> {
  served ??= get<List<{ id: string }>>(path("models")).then((page) => page.data[0]?.id ?? "");
  return served;
}

interface Given {
  talk: Conversation;
  treeShown: boolean;
  onTree: () => void;
  settingsShown: boolean;
  onSettings: (shown: boolean) => void;
}

export function Talk({ talk, treeShown, onTree, settingsShown, onSettings }: Given) {
  useWatched(talk);
  const scroller = useRef<HTMLDivElement>(null);
  const follows = useRef(true);
  const [point, choose] = useState<{ how: "fork" | "remember"; turn: number } | null>(null);
  const [looked, look] = useState<number | null>(null);
  const [model, setModel] = useState("");
  useEffect(() => {
    servedModel().then(setModel, () => (served = null));
  }, []);
  const [draft, write] = useState(drafts.get(talk.name ?? ""));
  const written = useRef(draft);
  written.current = draft;
  const setDraft = (text: string) => {
    drafts.set(talk.name ?? "", text);
    write(text);
  };
  const actions = useMemo<Actions>(
    () => ({
      branch: (turn, said, begun) => {
        if (talk.writing) return;
        follows.current = true;
        void talk.branch(turn, said, begun);
      },
      goOn: () => void (talk.writing || talk.goOn()),
      fork: (turn) => choose({ how: "fork", turn }),
      remember: (turn) => choose({ how: "remember", turn }),
      inside: (turn) => look(turn),
      step: (turn, by) => void step(talk, turn, by),
      answer: (results) => void talk.send(results),
    }),
    [talk],
  );
  const queue = useMemo(() => new DrawQueue(() => placeOf(scroller.current!).turn), [talk]);
  const first = useRef(talk.first);
  const place = useRef<Place | null>(null);
  const kept = useRef(0);
  // Before older turns are put in: where the reader is.
  if (talk.first < first.current && !follows.current && talk.wanted === null) place.current = placeOf(scroller.current!);
  first.current = talk.first;
  useLayoutEffect(() => {
    const element = scroller.current!;
    if (talk.wanted !== null && talk.state === "ready") {
      follows.current = false;
      place.current = null;
      show(talk, talk.wanted);
    } else if (follows.current) element.scrollTop = element.scrollHeight;
  });
  useEffect(() => {
    // Behind every layout: what is drawn later, or comes into view, gets its true height only then.
    const element = scroller.current!;
    const observer = new ResizeObserver(() => {
      if (follows.current) element.scrollTop = element.scrollHeight;
      else if (place.current) kept.current = keepPlace(element, place.current);
    });
    observer.observe(element.firstElementChild!);
    return () => observer.disconnect();
  }, []);
  const onScroll = () => {
    const element = scroller.current!;
    // The reader has moved on.
    if (element.scrollTop !== kept.current) place.current = null;
    follows.current = element.scrollHeight - element.scrollTop - element.clientHeight < NEAR;
    if (element.scrollTop < 4 * element.clientHeight && talk.first > 1) void talk.earlier();
  };
  const send = (text: string) => {
    follows.current = true;
    const from = talk.name ?? "";
    // Until the server has it, it is kept: a reload, a limit or a server that is away loses nothing.
    drafts.set(from, text);
    const back = () => {
      if (!written.current) setDraft(text);
    };
    talk.send([{ role: "user", content: text }]).then(
      (accepted) => {
        if (!accepted) back();
        else if (drafts.get(from) === text) drafts.set(from, "");
      },
      (error) => {
        notifyError(error);
        back();
      },
    );
  };
  const own = useMemo(
    () => (talk.tree && talk.name !== null ? talk.tree.pathOf(talk.name) : []),
    [talk.tree, talk.name],
  );
  const hidden = talk.pending && talk.pending.turn <= talk.count && talk.pending.error === null ? talk.pending.turn : Infinity;
  const groups = useMemo(() => grouped(talk.turns.filter((turn) => turn.turn < hidden)), [talk.turns, hidden]);
  return (
    <div class={treeShown ? "talk with-tree" : "talk"}>
      <div class="column">
        <header class="talk-head">
          <h1 title={talk.name ?? undefined}>{talk.name === null ? texts.nav.newConversation : middle(talk.name, 60)}</h1>
          {model && (
            <span class="hint model" title={texts.talk.by(model)}>
              {middle(model)}
            </span>
          )}
          <div class="row" role="toolbar" aria-label={texts.talk.tools}>
            <button type="button" class="quiet" onClick={() => onSettings(true)}>
              {texts.settings.open}
            </button>
            <button type="button" class="quiet" aria-expanded={treeShown} aria-controls="branches" onClick={onTree}>
              {treeShown ? texts.tree.hide : texts.tree.show}
            </button>
          </div>
        </header>
        <div class="turns" ref={scroller} onScroll={onScroll} id="conversation" tabIndex={-1}>
          <div class="inner">
            {talk.first > 1 && (
              <button type="button" class="quiet" onClick={() => void talk.earlier()}>
                {texts.talk.earlier}
              </button>
            )}
            {talk.system && talk.first <= 1 && <Said message={{ role: "system", content: talk.system }} />}
            {talk.state === "new" && !talk.pending && <p class="hint">{texts.talk.empty}</p>}
            {talk.state === "ready" && !talk.count && !talk.pending && <p class="hint">{texts.talk.empty}</p>}
            {talk.state === "gone" && <p class="problem">{talk.name?.includes("/") ? texts.talk.slashed : texts.talk.gone}</p>}
            {talk.state === "unreachable" && (
              <p class="problem" role="status">
                {texts.errors.trying}
              </p>
            )}
            {groups.map(([number, turns]) => (
              <TurnGroup
                key={number}
                talk={talk}
                name={talk.name}
                turns={turns}
                tree={talk.tree}
                own={own}
                last={turns[turns.length - 1]!.turn === talk.count ? talk.count : 0}
                busy={talk.writing}
                actions={actions}
                queue={queue}
              />
            ))}
            {talk.pending && <PendingTurn talk={talk} pending={talk.pending} onDraft={setDraft} />}
            {talk.busyElsewhere && (
              <p class="note" role="status">
                {texts.talk.busyElsewhere}
              </p>
            )}
          </div>
        </div>
        <Composer
          writing={talk.writing}
          stopping={talk.pending?.stopping ?? false}
          draft={draft}
          onDraft={setDraft}
          onSend={send}
          onStop={() => void talk.stop()}
        />
      </div>
      {treeShown && (
        <aside id="branches" class="tree" aria-label={texts.tree.title}>
          <div class="row">
            <h2>{texts.tree.title}</h2>
            <button type="button" class="quiet" aria-label={texts.tree.hide} onClick={onTree}>
              ✕
            </button>
          </div>
          <TreePane talk={talk} />
        </aside>
      )}
      {settingsShown && <SettingsDialog talk={talk} onClose={() => onSettings(false)} />}
      {point && <PointDialog talk={talk} {...point} onClose={() => choose(null)} />}
      {looked !== null && talk.name !== null && (
        <Inside session={talk.name} turn={looked} onClose={() => look(null)} />
      )}
    </div>
  );
}

function PendingTurn({ talk, pending, onDraft }: { talk: Conversation; pending: Pending; onDraft: (text: string) => void }) {
  const { reply, error, said } = pending;
  const written = reply?.text ?? "";
  const again = (overflow?: string) => {
    const before = talk.dismiss();
    if (!before) return;
    if (overflow) talk.settings = { ...talk.settings, overflow };
    const own = before.said.find((message) => message.role === "user")?.content ?? "";
    onDraft("");
    talk.send(before.said).then(
      (accepted) => accepted || onDraft(own),
      (error) => {
        notifyError(error);
        onDraft(own);
      },
    );
  };
  const onward = () => {
    const before = talk.dismiss();
    if (before) void talk.branch(before.turn, before.said, { text: written, reasoning: reply?.reasoning ?? "" });
  };
  const dismiss = () => {
    const before = talk.dismiss();
    const own = before?.said.find((message) => message.role === "user");
    if (own?.content) onDraft(own.content);
  };
  return (
    <article class="turn pending" aria-busy={error === null}>
      {said.map((message) => (
        <Said message={message} />
      ))}
      {reply && (written || reply.reasoning || reply.calls.length) ? (
        <ReplyBody text={written} reasoning={reply.reasoning} calls={reply.calls} streaming={error === null} />
      ) : error === null ? (
        <p class="hint">{texts.talk.waiting}</p>
      ) : null}
      {error !== null && (
        <div class="problem" role="alert">
          <p>{error}</p>
          {pending.full && (
            <div class="row" role="group" aria-label={texts.talk.full}>
              <span>{texts.talk.full}</span>
              {["drop_oldest", "fold"].map((policy) => (
                <button type="button" onClick={() => again(policy)}>
                  {texts.settings.overflows[policy]}
                </button>
              ))}
            </div>
          )}
          <div class="row">
            <button type="button" onClick={() => again()}>
              {texts.talk.again}
            </button>
            {(written || reply?.reasoning) && talk.name !== null && (
              <button type="button" class="quiet" onClick={onward}>
                {texts.talk.onward}
              </button>
            )}
            <button type="button" class="quiet" onClick={dismiss}>
              {texts.talk.dismiss}
            </button>
          </div>
        </div>
      )}
    </article>
  );
}

/** Bring the turn that is wanted into view, or have it read. */
function show(talk: Conversation, turn: number): void {
  const element = document.getElementById(`turn-${turn}`);
  if (!element) {
    if (turn < talk.first) void talk.reach(turn);
    else talk.wanted = null;
    return;
  }
  talk.wanted = null;
  element.focus({ preventScroll: true });
  element.scrollIntoView({ block: "start" });
  // What is drawn lazily gets its true height only now.
  requestAnimationFrame(() => element.scrollIntoView({ block: "start" }));
}

async function step(talk: Conversation, turn: number, by: number): Promise<void> {
  const tree = talk.tree;
  const id = tree?.pathOf(talk.name!)[turn];
  if (!tree || !id) return;
  const siblings = tree.siblings(id);
  const next = siblings[siblings.indexOf(id) + by];
  if (next) await goTo(talk, tree, next);
}

interface PointGiven {
  talk: Conversation;
  how: "fork" | "remember";
  turn: number;
  onClose: () => void;
}

function PointDialog({ talk, how, turn, onClose }: PointGiven) {
  const [name, write] = useState(how === "fork" ? `${talk.name}-${turn}` : "");
  const [note, writeNote] = useState("");
  const submit = async () => {
    try {
      if (how === "fork") {
        await forkAs(talk.name!, turn, name);
        openAt(name, turn);
      } else {
        const said: Message | undefined = talk.turns.find((each) => each.turn === turn)?.messages[0];
        await post(path("sessions", talk.name!, "label"), { label: name, note: note || (said?.content ?? "").slice(0, 200), turn });
        await talk.readTree();
      }
      onClose();
    } catch (error) {
      notifyError(error);
    }
  };
  return (
    <Dialog title={how === "fork" ? texts.talk.forkTitle : texts.talk.rememberTitle} onClose={onClose}>
      <form
        class="settings"
        onSubmit={(event) => {
          event.preventDefault();
          if (name.trim()) void submit();
        }}
      >
        <label>
          {how === "fork" ? texts.talk.name : texts.talk.label}
          <input value={name} required maxLength={200} onInput={(event) => write(event.currentTarget.value)} />
        </label>
        {how === "remember" && (
          <label>
            {texts.talk.note}
            <textarea rows={2} value={note} onInput={(event) => writeNote(event.currentTarget.value)} />
          </label>
        )}
        <button type="submit">{how === "fork" ? texts.talk.make : texts.talk.keep}</button>
      </form>
    </Dialog>
  );
}
