/** All sessions: search, sleep and wake, export and import, delete with undo. */

import { useEffect, useRef, useState } from "preact/hooks";
import { get, path, post, query, request } from "../api";
import type { List, Plan, Reuse, SessionAnswer, SessionState, SessionSummary } from "../api";
import { deleteSession, leaving, notify, notifyError } from "../notices";
import { link, open } from "../route";
import { useWatched } from "../store";
import { bytes, count, texts, when } from "../texts";
import { Dialog } from "./Dialog";

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
        <input
          type="search"
          aria-label={words.search}
          placeholder={words.search}
          value={text}
          onInput={(event) => search(event.currentTarget.value)}
        />
      </header>
      <ImportBox onDone={reload} />
      {found && !rows.length && <p class="hint">{text ? words.noneFound : words.none}</p>}
      {rows.length > 0 && (
        <div class="wide" tabIndex={0} role="region" aria-label={words.title}>
          <table class="list">
            <thead>
              <tr>
                {Object.values(words.columns).map((column) => (
                  <th scope="col">{column}</th>
                ))}
              </tr>
            </thead>
            <tbody>
              {rows.map((session) => (
                <Row key={session.name} session={session} asked={asked} onChanged={reload} onWake={plan} />
              ))}
            </tbody>
          </table>
        </div>
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
  const row = useRef<HTMLTableRowElement>(null);
  const { name } = session;
  useEffect(() => {
    // Only of those that are looked at: each costs the engine a look-up.
    const seen = new IntersectionObserver((entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      seen.disconnect();
      get<SessionState>(path("sessions", name, "state")).then(show, () => {});
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
  return (
    <tr ref={row}>
      <th scope="row">
        <a href={link({ view: "talk", session: name })}>{name}</a>
      </th>
      <td>{session.model}</td>
      <td class="fit">{count(session.turns)}</td>
      <td class="fit">{count(session.tokens)}</td>
      <td class="fit">{when(session.updated)}</td>
      <td>
        {session.origin
          ? words.origin(session.origin.how, session.origin.session)
          : session.agent || (session.kind === "session" ? "" : session.kind)}
      </td>
      <td>{status && <span class={`status ${status === words.awake ? "on" : "off"}`}>{status}</span>}</td>
      <td class="fit">{disk === null ? "" : bytes(disk)}</td>
      <td>
        <div class="row">
          {state?.awake === false ? (
            <button type="button" class="quiet" aria-label={words.wake(name)} onClick={() => void wake()}>
              {words.verbs.wake}
            </button>
          ) : (
            <button type="button" class="quiet" aria-label={words.sleep(name)} onClick={() => void sleep()}>
              {words.verbs.sleep}
            </button>
          )}
          <button type="button" class="quiet" aria-label={words.exports(name)} onClick={() => download(name).catch(notifyError)}>
            {words.verbs.export}
          </button>
          <button type="button" class="quiet" aria-label={words.remove(name)} onClick={() => deleteSession(name, onChanged, onChanged)}>
            {words.verbs.remove}
          </button>
        </div>
      </td>
    </tr>
  );
}

/** Through a request of the page's own: a link could not carry the key. */
async function download(name: string): Promise<void> {
  const response = await request(path("sessions", name, "export"));
  const address = URL.createObjectURL(await response.blob());
  const anchor = document.createElement("a");
  anchor.href = address;
  anchor.download = `${name}.perdure`;
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
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

function ImportBox({ onDone }: { onDone: () => void }) {
  const [over, mark] = useState(false);
  const take = async (files: File[]) => {
    for (const file of files) {
      try {
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
  return (
    <label
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
      {words.drop}
      <input
        type="file"
        aria-label={words.import}
        onChange={(event) => {
          void take([...(event.currentTarget.files ?? [])]);
          event.currentTarget.value = "";
        }}
      />
    </label>
  );
}
