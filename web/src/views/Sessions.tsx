/** All sessions: search, sleep and wake, export and import, delete with undo. */

import { Download, Moon, Search, Sun, Trash, Upload } from "lucide-preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { get, path, post, query, request } from "../api";
import type { List, Plan, Reuse, SessionAnswer, SessionState, SessionSummary } from "../api";
import { agentName, isOpaque, readable, titleOf } from "../names";
import { deleteSession, leaving, notify, notifyError } from "../notices";
import { IconButton } from "../parts/Icon";
import { FileButton, Menu, MenuItem } from "../parts/Pop";
import { Table } from "../parts/Table";
import { link, open } from "../route";
import { beginning, download, readSessions } from "../sessions";
import { useWatched } from "../store";
import { bytes, count, middle, texts, when } from "../texts";
import { Dialog } from "./Dialog";
import { EXPORTS } from "./Sidebar";

const words = texts.sessions;
const PAGE = 50;
const TYPING = 250;

export function Sessions() {
  const { value: gone } = useWatched(leaving);
  const [text, search] = useState("");
  const [found, show] = useState<SessionSummary[] | null>(null);
  const [more, setMore] = useState(false);
  const [asked, again] = useState(0);
  const [waking, plan] = useState<{ name: string; plan: Plan } | null>(null);
  const read = async (after: string | null, before: SessionSummary[]) => {
    const page = await get<List<SessionSummary>>(path("sessions") + query({ limit: PAGE, after, text: text.trim() || null }));
    show([...before, ...page.data]);
    setMore(page.has_more);
  };
  useEffect(() => {
    const timer = setTimeout(() => read(null, []).catch(notifyError), text ? TYPING : 0);
    return () => clearTimeout(timer);
  }, [text, asked]);
  const reload = () => again((before) => before + 1);
  const rows = found?.filter((session) => !gone.has(session.name)) ?? [];
  return (
    <div class="page">
      <header class="row">
        <h1>{words.title}</h1>
        <label class="search">
          <Search size={16} aria-hidden="true" />
          <input
            type="search"
            aria-label={words.search}
            placeholder={words.search}
            value={text}
            onInput={(event) => search(event.currentTarget.value)}
          />
        </label>
      </header>
      <ImportBox onDone={reload} />
      {found && !rows.length && <p class="hint">{text ? words.noneFound : words.none}</p>}
      {rows.length > 0 && (
        <Table label={words.title} columns={words.columns} figures={["turns", "tokens", "size"]} cards>
          {rows.map((session) => (
            <Row key={session.name} session={session} asked={asked} onChanged={reload} onWake={plan} />
          ))}
        </Table>
      )}
      {more && (
        <button type="button" class="quiet" onClick={() => read(found![found!.length - 1]!.name, found!).catch(notifyError)}>
          {words.more}
        </button>
      )}
      {waking && (
        <WakeDialog
          {...waking}
          onClose={() => plan(null)}
          onDone={() => {
            plan(null);
            reload();
          }}
        />
      )}
    </div>
  );
}

interface RowGiven {
  session: SessionSummary;
  /** How often the list was read: its state may have changed since. */
  asked: number;
  onChanged: () => void;
  onWake: (planned: { name: string; plan: Plan }) => void;
}

function Row({ session, asked, onChanged, onWake }: RowGiven) {
  const [state, show] = useState<SessionState | null>(null);
  const [begun, begin] = useState("");
  const row = useRef<HTMLTableRowElement>(null);
  const { name } = session;
  useEffect(() => {
    // Only of those that are looked at: each costs the engine a look-up.
    const seen = new IntersectionObserver((entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      seen.disconnect();
      get<SessionState>(path("sessions", name, "state")).then(show, () => {});
      if (isOpaque(name) && !session.title) beginning(name).then(begin, () => {});
    });
    seen.observe(row.current!);
    return () => seen.disconnect();
  }, [name, session.updated, asked]);
  const refresh = () => get<SessionState>(path("sessions", name, "state")).then(show, notifyError);
  const sleep = () =>
    post(path("sessions", name, "sleep")).then(() => {
      notify(words.slept(name));
      return refresh();
    }, notifyError);
  const wake = () => get<Plan>(path("sessions", name, "plan")).then((plan) => onWake({ name, plan }), notifyError);
  const disk = state ? state.turn_bytes + (state.tiers.disk?.nbytes ?? 0) : null;
  const status = state && (state.awake ? words.awake : state.tiers.disk ? words.asleep : words.cold);
  const title = begun || titleOf(session);
  return (
    <tr ref={row}>
      <th scope="row">
        <a href={link({ view: "talk", session: name })} title={name}>
          {title}
        </a>
        {isOpaque(name) && <span class="hint">{middle(name, 26)}</span>}
      </th>
      <td data-label={words.columns.from}>
        {session.origin
          ? words.origin(session.origin.how, session.origin.session && readable(session.origin.session))
          : session.agent && session.agent !== "browser"
            ? agentName(session.agent)
            : session.kind === "session"
              ? ""
              : session.kind}
      </td>
      <td data-label={words.columns.model} class="model-cell" title={session.model}>
        {session.model && middle(session.model, 26)}
      </td>
      <td data-label={words.columns.turns} class="num">
        {count(session.turns)}
      </td>
      <td data-label={words.columns.tokens} class="num">
        {count(session.tokens)}
      </td>
      <td data-label={words.columns.size} class="num">
        {disk === null ? "" : bytes(disk)}
      </td>
      <td data-label={words.columns.changed} class="fit">
        {when(session.updated)}
      </td>
      <td data-label={words.columns.state}>
        {status && <span class={`status ${status === words.awake ? "on" : "off"}`}>{status}</span>}
      </td>
      <td class="row-actions">
        {state?.awake === false ? (
          <IconButton icon={Sun} label={words.wake(name)} onClick={() => void wake()} />
        ) : (
          <IconButton icon={Moon} label={words.sleep(name)} onClick={() => void sleep()} />
        )}
        <Menu label={words.exports(name)} icon={Download}>
          {(close) =>
            EXPORTS.map((form) => (
              <MenuItem
                icon={Download}
                onPick={() => {
                  close();
                  void download(session, form).catch(notifyError);
                }}
              >
                {words.exportAs[form]}
              </MenuItem>
            ))
          }
        </Menu>
        <IconButton icon={Trash} label={words.remove(name)} onClick={() => deleteSession(name, onChanged, onChanged, title)} />
      </td>
    </tr>
  );
}

interface WakeGiven {
  name: string;
  plan: Plan;
  onClose: () => void;
  onDone: () => void;
}

function WakeDialog({ name, plan, onClose, onDone }: WakeGiven) {
  const reused = Object.values(plan.tiers).reduce((sum, tokens) => sum + tokens, 0);
  const wake = async () => {
    try {
      const report = await post<Reuse>(path("sessions", name, "wake"));
      const restored = Object.values(report.tiers).reduce((sum, tokens) => sum + tokens, 0);
      notify(words.woken(name, restored));
      onDone();
    } catch (error) {
      notifyError(error);
    }
  };
  return (
    <Dialog title={words.planTitle(name)} onClose={onClose}>
      <p>{words.plan(reused, Object.keys(plan.tiers).join(", "), plan.nbytes ? bytes(plan.nbytes) : "", plan.computed)}</p>
      <button type="button" onClick={() => void wake()}>
        {words.planGo}
      </button>
    </Dialog>
  );
}

interface Imported extends SessionAnswer {
  left_out: Record<string, string>;
}

interface ImportedChats {
  names: string[];
  branches: number;
  known: number;
  left_out: { title: string; why: string }[];
  not_named: number;
}

const NAMED = 3;
/** Chats that are named where they were not taken; of more, their number. */

function ImportBox({ onDone }: { onDone: () => void }) {
  const [over, mark] = useState(false);
  const take = async (files: File[]) => {
    for (const file of files) {
      try {
        if (/\.(json|zip)$/i.test(file.name)) {
          await takeChats(file);
          continue;
        }
        const response = await request(path("sessions", "import"), {
          method: "POST",
          headers: { "content-type": "application/octet-stream" },
          body: file,
        });
        const made: Imported = await response.json();
        notify(words.imported(made.name));
        for (const [what, why] of Object.entries(made.left_out)) notify(words.leftOut(what, why));
        if (files.length === 1) open({ view: "talk", session: made.name });
      } catch (error) {
        notifyError(error);
      }
    }
    onDone();
  };
  const takeChats = async (file: File) => {
    notify(words.importing(file.name));
    const headers = { "content-type": "application/octet-stream" };
    const made: ImportedChats = await (await request(path("chats", "import"), { method: "POST", headers, body: file })).json();
    notify(words.importedChats(made.names.length, made.branches, made.known));
    for (const { title, why } of made.left_out.slice(0, NAMED)) notify(words.leftOut(title, why), "error");
    const more = made.left_out.length + made.not_named - NAMED;
    if (more > 0) notify(words.chatsLeftOut(more), "error");
    await readSessions().catch(() => {});
    if (made.names.length === 1) open({ view: "talk", session: made.names[0]! });
  };
  return (
    <div
      class={over ? "drop over" : "drop"}
      onDragOver={(event) => {
        event.preventDefault();
        mark(true);
      }}
      onDragLeave={() => mark(false)}
      onDrop={(event) => {
        event.preventDefault();
        mark(false);
        void take([...(event.dataTransfer?.files ?? [])]);
      }}
    >
      <span>{words.drop}</span>
      <FileButton label={words.import} icon={Upload} accept=".perdure,.json,.zip" onFiles={(files) => void take(files)} />
    </div>
  );
}
