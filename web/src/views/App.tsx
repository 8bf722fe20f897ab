/** The frame of the page: navigation, the view that is open, notices, and the question for a key. */

import { useEffect, useRef, useState } from "preact/hooks";
import { Menu as MenuIcon, X } from "lucide-preact";
import { onKeyWanted } from "../api";
import { Conversation } from "../conversation";
import { readModels } from "../models";
import { titleOf } from "../names";
import { dismiss, notices } from "../notices";
import { IconButton, Mark } from "../parts/Icon";
import { open, route } from "../route";
import { useWatched } from "../store";
import { texts } from "../texts";
import { Compare } from "./Compare";
import { Dialog } from "./Dialog";
import { Machine } from "./Machine";
import { Sessions } from "./Sessions";
import { Sidebar } from "./Sidebar";
import { Talk } from "./Talk";
import { Usage } from "./Usage";


export function App() {
  const { value: here } = useWatched(route);
  const [talk, setTalk] = useState(() => new Conversation(here.view === "talk" ? here.session : null));
  const [treeShown, showTree] = useState(false);
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
  useWatched(talk);
  useEffect(() => {
    readModels().catch(() => {});
  }, []);
  useEffect(() => showMenu(false), [here]);
  useEffect(() => {
    const talking = talk.name === null ? texts.nav.newConversation : titleOf({ name: talk.name, title: talk.title, agent: "" });
    document.title = `${here.view === "talk" ? talking : texts.nav[here.view === "compare" ? "talk" : here.view]} · ${texts.title}`;
  }, [here, talk.name, talk.title]);
  useEffect(() => {
    const onKey = (event: KeyboardEvent) => {
      const typing = event.target instanceof Element && event.target.matches("input, textarea, select");
      if (event.key === "?" && !typing) showKeys(true);
      if (event.key === "Escape") showMenu(false);
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
      <Sidebar talk={talk} shown={menuShown} onClose={() => showMenu(false)} onKeys={() => showKeys(true)} />
      {menuShown && <div class="shade" onClick={() => showMenu(false)} />}
      <main id="main" tabIndex={-1}>
        {here.view !== "talk" && (
          <div class="only-phone page-bar">
            <IconButton icon={MenuIcon} label={texts.nav.menu} expanded={menuShown} controls="menu" onClick={() => showMenu(true)} />
          </div>
        )}
        {here.view === "talk" && (
          <Talk
            key={talk}
            talk={talk}
            treeShown={treeShown}
            onTree={() => showTree(!treeShown)}
            onMenu={() => showMenu(true)}
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

function Notices() {
  const { value: list } = useWatched(notices);
  return (
    <div class="notices" role="status" aria-live="polite">
      {list.map((notice) => (
        <p key={notice.id} class={notice.kind}>
          <span class="item-text">{notice.text}</span>
          {notice.undo && (
            <button type="button" class="quiet" onClick={notice.undo}>
              {texts.sessions.undo}
            </button>
          )}
          <IconButton
            icon={X}
            label={texts.talk.dismiss}
            onClick={() => {
              dismiss(notice.id);
              notice.closed?.();
            }}
          />
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
        <Mark size={36} />
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
