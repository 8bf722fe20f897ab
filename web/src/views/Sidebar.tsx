/** The sidebar: conversations by folder and age, with search and what can be done with each. */

import {
  ArrowLeft,
  Bot,
  ChartColumn,
  ChevronRight,
  CircleQuestionMark,
  Download,
  Ellipsis,
  Folder,
  FolderInput,
  Gauge,
  KeyRound,
  Layers,
  Monitor,
  Moon,
  PenLine,
  Pin,
  PinOff,
  Search,
  SquarePen,
  Sun,
  Trash,
  X,
} from "lucide-preact";
import type { LucideIcon } from "lucide-preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { changeKey, hasKey, type SessionSummary } from "../api";
import type { Conversation } from "../conversation";
import { age, agentName, isForeign, isOpaque, titleOf } from "../names";
import { deleteSession, leaving, notifyError } from "../notices";
import { IconButton, Mark } from "../parts/Icon";
import { Menu, MenuItem } from "../parts/Pop";
import { link, open, route, type Route } from "../route";
import { beginning, download, file, folders, listed, readMoreSessions, readSessions, type ExportForm } from "../sessions";
import { useWatched } from "../store";
import { texts, when } from "../texts";
import { theme, THEMES } from "../theme";
import { Dialog } from "./Dialog";

const words = texts.nav;
const TYPING = 250;
const THEME_ICONS: Record<(typeof THEMES)[number], LucideIcon> = { auto: Monitor, light: Sun, dark: Moon };
const AGES = ["today", "yesterday", "week", "older"] as const;

interface Given {
  talk: Conversation;
  shown: boolean;
  onClose: () => void;
  onKeys: () => void;
}

export function Sidebar({ talk, shown, onClose, onKeys }: Given) {
  useWatched(talk);
  const { value: here } = useWatched(route);
  const { value: gone } = useWatched(leaving);
  const { value: colours } = useWatched(theme);
  const { value: keyed } = useWatched(hasKey);
  const { value: list } = useWatched(listed);
  const [text, search] = useState("");
  const [moving, move] = useState<SessionSummary | null>(null);
  useEffect(() => {
    const timer = setTimeout(() => readSessions(text).catch(() => {}), text ? TYPING : 0);
    return () => clearTimeout(timer);
  }, [here, talk.count, talk.state, talk.title, gone, text]);
  const sessions = list.sessions.filter((session) => !gone.has(session.name));
  const own = sessions.filter((session) => !isForeign(session));
  const filed = own.filter((session) => !session.pinned && session.folder);
  const loose = own.filter((session) => !session.pinned && !session.folder);
  const foreign = sessions.filter((session) => isForeign(session) && !session.pinned);
  const items = (some: SessionSummary[], withBegin = false) => (
    <ul>
      {some.map((session) => (
        <Item key={session.name} session={session} current={here.view === "talk" && here.session === session.name} withBegin={withBegin} onMove={move} />
      ))}
    </ul>
  );
  return (
    <nav id="menu" aria-label={words.label} class={shown ? "side shown" : "side"}>
      <a class="skip" href="#main" onClick={(event) => skip(event)}>
        {words.skip}
      </a>
      <div class="side-head">
        <a class="brand" href={link({ view: "talk", session: null })}>
          <Mark /> {texts.title}
        </a>
        <IconButton icon={X} label={words.close} class="only-drawer" onClick={onClose} />
      </div>
      <a class="button new" href={link({ view: "talk", session: null })}>
        <SquarePen size={17} aria-hidden="true" /> {words.newConversation}
      </a>
      <label class="search">
        <Search size={16} aria-hidden="true" />
        <input type="search" aria-label={words.search} placeholder={words.search} value={text} onInput={(event) => search(event.currentTarget.value)} />
      </label>
      <div class="side-list">
        {text.trim() ? (
          <>
            <h2 class="group-name">{words.found}</h2>
            {sessions.length ? items(sessions) : <p class="hint">{texts.sessions.noneFound}</p>}
          </>
        ) : (
          <>
            {own.some((session) => session.pinned) && (
              <section>
                <h2 class="group-name">{words.pinned}</h2>
                {items(own.filter((session) => session.pinned))}
              </section>
            )}
            {[...new Set(filed.map((session) => session.folder))].sort().map((folder) => (
              <Group key={folder} name={folder} icon={Folder} count={filed.filter((session) => session.folder === folder).length}>
                {items(filed.filter((session) => session.folder === folder))}
              </Group>
            ))}
            {AGES.map((name) => {
              const some = loose.filter((session) => age(session.updated) === name);
              return some.length > 0 && (
                <section key={name}>
                  <h2 class="group-name">{words.ages[name]}</h2>
                  {items(some)}
                </section>
              );
            })}
            {foreign.length > 0 && (
              <Group name={words.foreign} icon={Bot} count={foreign.length} closed>
                {items(foreign, true)}
              </Group>
            )}
          </>
        )}
        {list.hasMore && (
          <button type="button" class="quiet more" onClick={() => void readMoreSessions().catch(notifyError)}>
            {texts.sessions.more}
          </button>
        )}
      </div>
      <div class="side-foot">
        <View icon={Layers} view="sessions" here={here} />
        <View icon={Gauge} view="machine" here={here} />
        <View icon={ChartColumn} view="usage" here={here} />
        <div class="side-tools">
          <Menu label={words.theme} icon={THEME_ICONS[colours]}>
            {(close) =>
              THEMES.map((name) => (
                <MenuItem
                  icon={THEME_ICONS[name]}
                  checked={name === colours}
                  onPick={() => {
                    theme.value = name;
                    close();
                  }}
                >
                  {words.themes[name]}
                </MenuItem>
              ))
            }
          </Menu>
          <IconButton icon={CircleQuestionMark} label={texts.shortcuts.open} onClick={onKeys} />
          {keyed && <IconButton icon={KeyRound} label={texts.key.change} onClick={() => void changeKey()} />}
        </div>
      </div>
      {moving && <MoveDialog session={moving} onClose={() => move(null)} />}
    </nav>
  );
}

function skip(event: Event): void {
  event.preventDefault();
  (document.getElementById("conversation") ?? document.querySelector("main"))?.focus();
}

function View({ icon: Icon, view, here }: { icon: LucideIcon; view: "sessions" | "machine" | "usage"; here: Route }) {
  return (
    <a class="view" href={link({ view })} aria-current={here.view === view ? "page" : undefined}>
      <Icon size={17} strokeWidth={1.75} aria-hidden="true" /> {words[view]}
    </a>
  );
}

interface GroupGiven {
  name: string;
  icon: LucideIcon;
  count: number;
  closed?: boolean;
  children: preact.ComponentChildren;
}

const OPENED = "perdure-group/";

/** Conversations under a name that folds them away; what is folded is not drawn. */
function Group({ name, icon: Icon, count, closed = false, children }: GroupGiven) {
  const [shown, show] = useState(() => (localStorage.getItem(OPENED + name) ?? String(!closed)) === "true");
  return (
    <section>
      <h2 class="group-name">
        <button
          type="button"
          class="group-fold"
          aria-expanded={shown}
          onClick={() => {
            localStorage.setItem(OPENED + name, String(!shown));
            show(!shown);
          }}
        >
          <ChevronRight size={14} class="turns-open" aria-hidden="true" />
          <Icon size={15} aria-hidden="true" />
          <span class="item-text">{name}</span>
          <span class="count">{count}</span>
        </button>
      </h2>
      {shown && children}
    </section>
  );
}

interface ItemGiven {
  session: SessionSummary;
  current: boolean;
  /** Whether it has no title that a person gave, and its first words are shown. */
  withBegin: boolean;
  onMove: (session: SessionSummary) => void;
}

function Item({ session, current, withBegin, onMove }: ItemGiven) {
  const [renaming, rename] = useState(false);
  const [begun, begin] = useState("");
  const { name } = session;
  useEffect(() => {
    if (withBegin || (isOpaque(name) && !session.title)) beginning(name).then(begin, () => {});
  }, [name]);
  const title = begun || titleOf(session);
  const finish = (text: string | null) => {
    rename(false);
    if (text?.trim() && text.trim() !== title) void file(name, { title: text.trim() }).catch(notifyError);
  };
  if (renaming)
    return (
      <li>
        <TitleField title={title} onDone={finish} />
      </li>
    );
  return (
    <li class={current ? "conversation current" : "conversation"}>
      <a href={link({ view: "talk", session: name })} aria-current={current ? "page" : undefined} title={name}>
        {title}
        {withBegin && <span class="hint">{`${agentName(session.agent)}, ${when(session.updated)}`}</span>}
      </a>
      <SessionMenu session={session} title={title} onRename={() => rename(true)} onMove={() => onMove(session)} />
    </li>
  );
}

/** Where a title is written in place. Enter and leaving it keep it, Escape does not. */
export function TitleField({ title, onDone }: { title: string; onDone: (text: string | null) => void }) {
  const box = useRef<HTMLInputElement>(null);
  const done = useRef(false);
  const finish = (text: string | null) => {
    if (done.current) return;
    done.current = true;
    onDone(text);
  };
  useEffect(() => {
    // A menu that closes gives the focus back to its button first.
    requestAnimationFrame(() => {
      box.current?.focus();
      box.current?.select();
    });
  }, []);
  return (
    <input
      ref={box}
      class="title-field"
      aria-label={texts.talk.title}
      defaultValue={title}
      maxLength={200}
      onKeyDown={(event) => {
        event.stopPropagation();
        if (event.key === "Enter") finish(event.currentTarget.value);
        else if (event.key === "Escape") finish(null);
      }}
      onBlur={(event) => document.hasFocus() && finish(event.currentTarget.value)}
    />
  );
}

interface SessionMenuGiven {
  session: SessionSummary;
  title: string;
  onRename?: () => void;
  onMove: () => void;
  onDeleted?: () => void;
}

export const EXPORTS: ExportForm[] = ["markdown", "json", "perdure"];

function SessionMenu({ session, title, onRename, onMove }: SessionMenuGiven) {
  const [exporting, showExports] = useState(false);
  const { name } = session;
  const again = () => void readSessions().catch(() => {});
  return (
    <Menu label={texts.sessions.actions(title)} icon={Ellipsis} class="icon item-menu" onOpen={() => showExports(false)}>
      {(close) =>
        exporting ? (
          <>
            <MenuItem icon={ArrowLeft} onPick={() => showExports(false)}>
              {texts.talk.cancel}
            </MenuItem>
            {EXPORTS.map((form) => (
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
        ) : (
          <>
            {onRename && (
              <MenuItem
                icon={PenLine}
                onPick={() => {
                  close();
                  onRename();
                }}
              >
                {texts.sessions.verbs.rename}
              </MenuItem>
            )}
            <MenuItem
              icon={session.pinned ? PinOff : Pin}
              onPick={() => {
                close();
                void file(name, { pinned: !session.pinned }).catch(notifyError);
              }}
            >
              {session.pinned ? texts.sessions.verbs.unpin : texts.sessions.verbs.pin}
            </MenuItem>
            <MenuItem
              icon={FolderInput}
              onPick={() => {
                close();
                onMove();
              }}
            >
              {texts.sessions.verbs.move}
            </MenuItem>
            <MenuItem icon={Download} onPick={() => showExports(true)}>
              {texts.sessions.verbs.export}
            </MenuItem>
            <MenuItem
              icon={Trash}
              danger
              onPick={() => {
                close();
                deleteSession(name, again, again, title);
                if (route.value.view === "talk" && route.value.session === name) open({ view: "talk", session: null });
              }}
            >
              {texts.sessions.verbs.remove}
            </MenuItem>
          </>
        )
      }
    </Menu>
  );
}

function MoveDialog({ session, onClose }: { session: SessionSummary; onClose: () => void }) {
  const [name, write] = useState("");
  const move = (folder: string) => {
    onClose();
    void file(session.name, { folder }).catch(notifyError);
  };
  return (
    <Dialog title={texts.sessions.moveTitle(titleOf(session))} onClose={onClose}>
      <div class="folder-list">
        {folders().map((folder) => (
          <button type="button" class="item" aria-pressed={folder === session.folder} onClick={() => move(folder)}>
            <Folder size={16} aria-hidden="true" />
            <span class="item-text">{folder}</span>
          </button>
        ))}
        {session.folder && (
          <button type="button" class="item" onClick={() => move("")}>
            <X size={16} aria-hidden="true" />
            <span class="item-text">{texts.sessions.noFolder}</span>
          </button>
        )}
      </div>
      <form
        class="settings"
        onSubmit={(event) => {
          event.preventDefault();
          if (name.trim()) move(name.trim());
        }}
      >
        <label>
          {texts.sessions.newFolder}
          <input value={name} maxLength={100} onInput={(event) => write(event.currentTarget.value)} />
        </label>
        <button type="submit">{texts.sessions.move}</button>
      </form>
    </Dialog>
  );
}
