/** The frame of the page: navigation, the view that is open, notices, and the question for a key. */

import { useEffect, useRef, useState } from "preact/hooks";
import { changeKey, get, hasKey, onKeyWanted, path, query, type List, type SessionSummary } from "../api";
import { Conversation } from "../conversation";
import { dismiss, leaving, notices } from "../notices";
import { link, open, route } from "../route";
import { useWatched } from "../store";
import { middle, texts } from "../texts";
import { theme, THEMES } from "../theme";
import { Compare } from "./Compare";
import { Dialog } from "./Dialog";
import { Machine } from "./Machine";
import { Sessions } from "./Sessions";
import { Talk } from "./Talk";
import { Usage } from "./Usage";

const RECENT = 20;

export function App() {
  const { value: here } = useWatched(route);
  const [talk, setTalk] = useState(() => new Conversation(here.view === "talk" ? here.session : null));
  const [treeShown, showTree] = useState(() => matchMedia("(min-width: 1100px)").matches);
  const [settingsShown, showSettings] = useState(false);
  const [keysShown, showKeys] = useState(false);
  const [menuShown, showMenu] = useState(false);
  const wanted = here.view === "talk" ? here.session : undefined;
  useEffect(() => {
    // A conversation that has just got its name is still the same one.
    if (wanted === undefined || talk.name === wanted) return;
    talk.close();
    setTalk(new Conversation(wanted));
  }, [wanted]);
  useEffect(() => {
    showMenu(false);
    document.title = here.view === "talk" ? `${here.session ?? texts.nav.newConversation} · ${texts.title}` : `${texts.nav[here.view === "compare" ? "talk" : here.view]} · ${texts.title}`;
  }, [here]);
  useEffect(() => {
    const onKey = (event: KeyboardEvent) => {
      const typing = event.target instanceof Element && event.target.matches("input, textarea, select");
      if (event.key === "?" && !typing) showKeys(true);
      if (event.key === "Escape" && talk.writing && !document.querySelector("dialog[open]")) void talk.stop();
      if (!event.altKey || event.ctrlKey || event.metaKey) return;
      const does: Record<string, () => void> = {
        KeyN: () => open({ view: "talk", session: null }),
        KeyB: () => showTree((shown) => !shown),
        KeyS: () => open({ view: "sessions" }),
        KeyM: () => open({ view: "machine" }),
        KeyC: () => document.getElementById("message")?.focus(),
        Comma: () => showSettings(true),
      };
      const act = does[event.code];
      if (act) {
        event.preventDefault();
        act();
      }
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, [talk]);
  return (
    <>
      <Sidebar talk={talk} shown={menuShown} onMenu={() => showMenu(!menuShown)} onKeys={() => showKeys(true)} />
      <main id="main" tabIndex={-1}>
        {here.view === "talk" && (
          <Talk
            key={talk}
            talk={talk}
            treeShown={treeShown}
            onTree={() => showTree(!treeShown)}
            settingsShown={settingsShown}
            onSettings={showSettings}
          />
        )}
        {here.view === "compare" && <Compare session={here.session} other={here.other} />}
        {here.view === "sessions" && <Sessions />}
        {here.view === "machine" && <Machine />}
        {here.view === "usage" && <Usage />}
      </main>
      {keysShown && <Shortcuts onClose={() => showKeys(false)} />}
      <KeyQuestion />
      <Notices />
    </>
  );
}

function skip(event: Event): void {
  event.preventDefault();
  (document.getElementById("conversation") ?? document.querySelector("main"))?.focus();
}

interface SidebarGiven {
  talk: Conversation;
  shown: boolean;
  onMenu: () => void;
  onKeys: () => void;
}

function Sidebar({ talk, shown, onMenu, onKeys }: SidebarGiven) {
  useWatched(talk);
  const { value: here } = useWatched(route);
  const { value: gone } = useWatched(leaving);
  const { value: colours } = useWatched(theme);
  const { value: keyed } = useWatched(hasKey);
  const [recent, show] = useState<SessionSummary[]>([]);
  useEffect(() => {
    get<List<SessionSummary>>(path("sessions") + query({ limit: RECENT })).then((page) => show(page.data), () => {});
  }, [here, talk.count, talk.state, gone]);
  const current = (view: string) => (here.view === view ? "page" : undefined);
  return (
    <nav aria-label={texts.nav.label} class={shown ? "shown" : undefined}>
      <a class="skip" href="#main" onClick={(event) => skip(event)}>
        {texts.nav.skip}
      </a>
      <div class="row">
        <span class="brand">{texts.title}</span>
        <button type="button" class="quiet menu" aria-expanded={shown} onClick={onMenu}>
          {texts.nav.menu}
        </button>
      </div>
      <div class="links">
        <a class="button" href={link({ view: "talk", session: null })}>
          {texts.nav.newConversation}
        </a>
        <a href={link({ view: "sessions" })} aria-current={current("sessions")}>
          {texts.nav.sessions}
        </a>
        <a href={link({ view: "machine" })} aria-current={current("machine")}>
          {texts.nav.machine}
        </a>
        <a href={link({ view: "usage" })} aria-current={current("usage")}>
          {texts.nav.usage}
        </a>
        <h2 class="who">{texts.nav.recent}</h2>
        <ul>
          {recent
            .filter((session) => !gone.has(session.name))
            .map((session) => (
              <li key={session.name}>
                <a
                  href={link({ view: "talk", session: session.name })}
                  aria-current={here.view === "talk" && here.session === session.name ? "page" : undefined}
                  title={session.name}
                >
                  {middle(session.name)}
                </a>
              </li>
            ))}
        </ul>
        <div class="foot">
          <label>
            {texts.nav.theme}
            <select value={colours} onChange={(event) => (theme.value = event.currentTarget.value as (typeof THEMES)[number])}>
              {THEMES.map((name) => (
                <option value={name}>{texts.nav.themes[name]}</option>
              ))}
            </select>
          </label>
          {keyed && (
            <button type="button" class="quiet" onClick={() => void changeKey()}>
              {texts.key.change}
            </button>
          )}
          <button type="button" class="quiet" onClick={onKeys}>
            {texts.shortcuts.open}
          </button>
        </div>
      </div>
    </nav>
  );
}

function Notices() {
  const { value: list } = useWatched(notices);
  return (
    <div class="notices" role="status" aria-live="polite">
      {list.map((notice) => (
        <p key={notice.id} class={notice.kind}>
          {notice.text}
          {notice.undo && (
            <button type="button" class="quiet" onClick={notice.undo}>
              {texts.sessions.undo}
            </button>
          )}
          <button
            type="button"
            class="quiet"
            aria-label={texts.talk.dismiss}
            onClick={() => {
              dismiss(notice.id);
              notice.closed?.();
            }}
          >
            ✕
          </button>
        </p>
      ))}
    </div>
  );
}

function Shortcuts({ onClose }: { onClose: () => void }) {
  return (
    <Dialog title={texts.shortcuts.title} onClose={onClose}>
      <dl class="keys">
        {texts.shortcuts.list.map(([key, does]) => (
          <div>
            <dt>
              <kbd>{key}</kbd>
            </dt>
            <dd>{does}</dd>
          </div>
        ))}
      </dl>
    </Dialog>
  );
}

function KeyQuestion() {
  const [question, ask] = useState<{ wrong: boolean; answer: (key: string) => void } | null>(null);
  const [key, write] = useState("");
  const element = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    onKeyWanted((wrong) => new Promise((answer) => ask({ wrong, answer })));
  }, []);
  useEffect(() => {
    if (question && !element.current?.open) element.current?.showModal();
  }, [question]);
  if (!question) return null;
  return (
    <dialog ref={element} aria-label={texts.key.title} onCancel={(event) => event.preventDefault()}>
      <form
        class="dialog settings"
        onSubmit={(event) => {
          event.preventDefault();
          if (!key.trim()) return;
          element.current?.close();
          ask(null);
          question.answer(key.trim());
          write("");
        }}
      >
        <h2>{texts.key.title}</h2>
        {question.wrong && (
          <p class="problem" role="alert">
            {texts.key.wrong}
          </p>
        )}
        <label>
          {texts.key.label}
          <input type="password" autocomplete="off" value={key} onInput={(event) => write(event.currentTarget.value)} />
        </label>
        <p class="hint">{texts.key.note}</p>
        <button type="submit">{texts.key.use}</button>
      </form>
    </dialog>
  );
}
