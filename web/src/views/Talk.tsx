/** The conversation: its turns, the reply on its way, and where the next message is written. */

import { Download, Ellipsis, GitBranch, Menu as MenuIcon, PenLine, Pencil, ScrollText, SlidersHorizontal, SquarePen, TriangleAlert, X } from "lucide-preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { path, post, type Message } from "../api";
import { SessionName } from "../attachments";
import { forkAs, openAt, type Conversation, type Pending } from "../conversation";
import { DrawQueue, keepPlace, placeOf, type Place } from "../drawing";
import { chosenModel, models } from "../models";
import { titleOf } from "../names";
import { notifyError } from "../notices";
import { Coded } from "../parts/Coded";
import { IconButton } from "../parts/Icon";
import { Menu, MenuItem } from "../parts/Pop";
import { link } from "../route";
import { download, file } from "../sessions";
import { useWatched } from "../store";
import { count, texts } from "../texts";
import { Composer } from "./Composer";
import { Dialog } from "./Dialog";
import { Beginnings, Greeting } from "./Greeting";
import { Inside } from "./Inside";
import { ModelPicker } from "./ModelPicker";
import { SettingsDialog, SystemDialog } from "./SettingsDialog";
import { EXPORTS, TitleField } from "./Sidebar";
import { goTo, TreePane } from "./TreePane";
import { grouped, TurnGroup } from "./TurnGroup";
import { ReplyBody, Said, type Actions } from "./TurnView";

const NEAR = 80;
/** Pixels from the end within which new text is followed. */

const DRAFT = "perdure-draft/";

/** What is written and not sent, by conversation: it outlasts a reload of the tab. */
export const drafts = {
  get: (name: string) => sessionStorage.getItem(DRAFT + name) ?? "",
  set: (name: string, text: string) => {
    try {
      if (text) sessionStorage.setItem(DRAFT + name, text);
      else sessionStorage.removeItem(DRAFT + name);
    } catch {
      // More than a tab may keep: it is lost with the tab, and no sooner.
    }
  },
};

interface Given {
  talk: Conversation;
  treeShown: boolean;
  onTree: () => void;
  onMenu: () => void;
  settingsShown: boolean;
  onSettings: (shown: boolean) => void;
}

export function Talk({ talk, treeShown, onTree, onMenu, settingsShown, onSettings }: Given) {
  useWatched(talk);
  const scroller = useRef<HTMLDivElement>(null);
  const follows = useRef(true);
  const [point, choose] = useState<{ how: "fork" | "remember"; turn: number } | null>(null);
  const [looked, look] = useState<number | null>(null);
  const chooser = useRef<(() => void) | null>(null);
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
  const send = (message: Message, words: string) => {
    follows.current = true;
    const from = talk.name ?? "";
    const text = message.content ?? "";
    // Until the server has it, it is kept: a reload, a limit or a server that is away loses nothing.
    drafts.set(from, text);
    talk.send([message], words).then(
      () => {
        // Accepted, or in the list of what can be sent again.
        if (drafts.get(from) === text) drafts.set(from, "");
      },
      (error) => {
        notifyError(error);
        if (!written.current) setDraft(text);
      },
    );
  };
  const own = useMemo(
    () => (talk.tree && talk.name !== null ? talk.tree.pathOf(talk.name) : []),
    [talk.tree, talk.name],
  );
  const hidden = talk.pending && talk.pending.turn <= talk.count && talk.pending.error === null ? talk.pending.turn : Infinity;
  const groups = useMemo(() => grouped(talk.turns.filter((turn) => turn.turn < hidden)), [talk.turns, hidden]);
  // Going on is offered once: beside the reply that was interrupted, where there is one.
  const last = talk.pending?.stored && talk.pending.error !== null ? 0 : talk.count;
  const isEmpty = (talk.state === "new" || talk.state === "ready") && !talk.count && !talk.pending && !talk.unsent.length;
  return (
    <SessionName.Provider value={talk.name}>
    <div class={treeShown ? "talk with-tree" : "talk"}>
      <div class={isEmpty ? "column empty" : "column"}>
        <Head talk={talk} treeShown={treeShown} onTree={onTree} onMenu={onMenu} onSettings={() => onSettings(true)} />
        <div class="turns" ref={scroller} onScroll={onScroll} id="conversation" tabIndex={-1}>
          <div class="inner">
            {talk.first > 1 && (
              <button type="button" class="quiet" onClick={() => void talk.earlier()}>
                {texts.talk.earlier}
              </button>
            )}
            {talk.system && talk.first <= 1 && !isEmpty && <Said message={{ role: "system", content: talk.system }} />}
            {isEmpty && <Greeting />}
            {talk.state === "gone" && <p class="problem">
                <Coded text={talk.name?.includes("/") ? texts.talk.slashed : texts.talk.gone} />
              </p>}
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
                last={turns[turns.length - 1]!.turn === last ? last : 0}
                busy={talk.writing}
                actions={actions}
                queue={queue}
              />
            ))}
            {/* Not before the server has said whether it has them: then they are not to be sent again. */}
            {(talk.state === "loading" ? [] : talk.unsent).map((failed) => (
              <PendingTurn talk={talk} pending={failed} />
            ))}
            {talk.pending && <PendingTurn talk={talk} pending={talk.pending} />}
            {talk.busyElsewhere && (
              <p class="note" role="status">
                {texts.talk.busyElsewhere}
              </p>
            )}
          </div>
        </div>
        <div class="bottom">
          <Composer
            writing={talk.writing}
            stopping={talk.pending?.stopping ?? false}
            draft={draft}
            onDraft={setDraft}
            onSend={send}
            onStop={() => void talk.stop()}
            session={talk.name}
            large={isEmpty}
            chooser={chooser}
          >
            <ContextUse talk={talk} isEmpty={isEmpty} />
          </Composer>
          {isEmpty && (
            <Beginnings
              onWrite={(text) => {
                setDraft(text);
                document.getElementById("message")?.focus();
              }}
              onFile={() => chooser.current?.()}
            />
          )}
        </div>
      </div>
      {treeShown && (
        <aside id="branches" class="tree" aria-label={texts.tree.title}>
          <div class="tree-head">
            <h2>{texts.tree.title}</h2>
            <IconButton icon={X} label={texts.tree.hide} onClick={onTree} />
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
    </SessionName.Provider>
  );
}

interface HeadGiven {
  talk: Conversation;
  treeShown: boolean;
  onTree: () => void;
  onMenu: () => void;
  onSettings: () => void;
}

/** Over the conversation: its title, which model answers, and what belongs to all of it. */
function Head({ talk, treeShown, onTree, onMenu, onSettings }: HeadGiven) {
  const [renaming, rename] = useState(false);
  const [systemShown, showSystem] = useState(false);
  const title = talk.name === null ? texts.nav.newConversation : titleOf({ name: talk.name, title: talk.title, agent: "" });
  const branches = talk.tree?.sessions.length ?? 0;
  const session = talk.name === null ? null : { name: talk.name, title: talk.title, agent: "" };
  return (
    <header class="talk-head">
      <IconButton icon={MenuIcon} label={texts.nav.menu} class="only-phone" onClick={onMenu} />
      <div class="talk-name">
        {renaming ? (
          <TitleField
            title={talk.title || title}
            onDone={(text) => {
              rename(false);
              if (text) void talk.rename(text).catch(notifyError);
            }}
          />
        ) : (
          <h1 title={talk.name ?? undefined}>{title}</h1>
        )}
        {talk.name !== null && !renaming && <IconButton icon={Pencil} label={texts.talk.rename} class="rename only-desk" onClick={() => rename(true)} />}
        <ModelPicker talk={talk} />
      </div>
      <div class="talk-tools" role="toolbar" aria-label={texts.talk.tools}>
        <IconButton icon={ScrollText} label={texts.settings.system} class={talk.system ? "only-desk marked" : "only-desk"} onClick={() => showSystem(true)} />
        {session && (
          <IconButton icon={GitBranch} label={treeShown ? texts.tree.hide : texts.tree.show} expanded={treeShown} controls="branches" onClick={onTree}>
            {branches > 1 && <span class="count">{branches}</span>}
          </IconButton>
        )}
        <IconButton icon={SlidersHorizontal} label={texts.settings.open} onClick={onSettings} />
        <a class="icon only-phone" href={link({ view: "talk", session: null })} aria-label={texts.nav.newConversation}>
          <SquarePen size={18} strokeWidth={1.75} aria-hidden="true" />
        </a>
        <Menu label={texts.talk.more} icon={Ellipsis}>
          {(close) => (
            <>
              {session && (
                <MenuItem
                  icon={PenLine}
                  onPick={() => {
                    close();
                    rename(true);
                  }}
                >
                  {texts.sessions.verbs.rename}
                </MenuItem>
              )}
              <MenuItem
                icon={ScrollText}
                onPick={() => {
                  close();
                  showSystem(true);
                }}
              >
                {texts.settings.system}
              </MenuItem>
              {session &&
                EXPORTS.map((form) => (
                  <MenuItem
                    icon={Download}
                    onPick={() => {
                      close();
                      void download(session, form).catch(notifyError);
                    }}
                  >
                    {texts.sessions.exportAs[form]}
                  </MenuItem>
                ))}
            </>
          )}
        </Menu>
      </div>
      {systemShown && <SystemDialog talk={talk} onClose={() => showSystem(false)} />}
    </header>
  );
}

/** Which model answers, and how much of its context the conversation takes. */
function ContextUse({ talk, isEmpty }: { talk: Conversation; isEmpty: boolean }) {
  useWatched(models);
  const model = chosenModel(talk.name);
  if (!model) return null;
  const used = Math.min(1, talk.tokens / model.n_ctx);
  const label = texts.composer.context(count(talk.tokens), count(model.n_ctx));
  return (
    <span class="context" title={label}>
      <svg class={used > 0.85 ? "ring full" : "ring"} viewBox="0 0 20 20" width="16" height="16" role="img" aria-label={label}>
        <circle cx="10" cy="10" r="8" pathLength="100" />
        <circle cx="10" cy="10" r="8" pathLength="100" class="used" stroke-dasharray={`${(100 * used).toFixed(1)} 100`} />
      </svg>
      <span class="context-words">{isEmpty ? texts.composer.answers(model.id, count(model.n_ctx)) : label}</span>
    </span>
  );
}

function PendingTurn({ talk, pending }: { talk: Conversation; pending: Pending }) {
  const { reply, error, said } = pending;
  const written = reply?.text ?? "";
  const again = (overflow?: string) => {
    talk.dismiss(pending);
    if (overflow) talk.settings = { ...talk.settings, overflow };
    talk.send(said).catch(notifyError);
  };
  const onward = () => {
    talk.dismiss(pending);
    void talk.branch(Math.min(pending.turn, talk.count + 1), said, { text: written, reasoning: reply?.reasoning ?? "" });
  };
  return (
    <article class="turn pending" aria-busy={error === null}>
      {said.map((message) => (
        <Said message={message} />
      ))}
      {reply && (written || reply.reasoning || reply.calls.length) ? (
        <ReplyBody text={written} reasoning={reply.reasoning} calls={reply.calls} streaming={error === null} />
      ) : error === null ? (
        <p class="waiting" role="status">
          <span class="unseen">{texts.talk.waiting}</span>
          <i /> <i /> <i />
        </p>
      ) : null}
      {error !== null && (
        <div class="trouble" role="alert">
          <p class="problem">
            <TriangleAlert size={16} aria-hidden="true" /> {error}
          </p>
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
          {pending.stored ? (
            <div class="row">
              <button type="button" disabled={talk.writing} onClick={() => void talk.resume()}>
                {texts.talk.resume}
              </button>
              <button type="button" class="quiet" disabled={talk.writing} onClick={() => void talk.resume(true)}>
                {texts.talk.anew}
              </button>
              <button type="button" class="quiet" disabled={talk.writing} onClick={() => void talk.discard()}>
                {texts.talk.discard}
              </button>
            </div>
          ) : (
          <div class="row">
            <button type="button" disabled={talk.writing} onClick={() => again()}>
              {texts.talk.again}
            </button>
            {(written || reply?.reasoning) && talk.name !== null && (
              <button type="button" class="quiet" disabled={talk.writing} onClick={onward}>
                {texts.talk.onward}
              </button>
            )}
            <button type="button" class="quiet" onClick={() => talk.dismiss(pending)}>
              {texts.talk.dismiss}
            </button>
          </div>
          )}
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
  const [name, write] = useState(how === "fork" ? texts.talk.forkName(talk.title || talk.name!, turn) : "");
  const [note, writeNote] = useState("");
  const submit = async () => {
    try {
      if (how === "fork") {
        await forkAs(talk.name!, turn, name);
        await file(name, { title: name });
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
