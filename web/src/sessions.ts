/** The list of sessions that the sidebar shows, and what can be done with one wherever it is listed. */

import { get, patch, path, query, request, type List, type Message, type SessionSummary, type Turn } from "./api";
import { firstWords, titleOf } from "./names";
import { notify } from "./notices";
import { Value } from "./store";
import { texts } from "./texts";

const PAGE = 100;

interface Listed {
  sessions: SessionSummary[];
  hasMore: boolean;
}

export const listed = new Value<Listed>({ sessions: [], hasMore: false });
let text = "";
let asked = 0;

/** Read the list again, as long as it was; with `search`, what has that in its name or text. */
export async function readSessions(search = text): Promise<void> {
  text = search;
  const mine = ++asked;
  const limit = Math.min(1000, Math.max(PAGE, listed.value.sessions.length));
  const page = await get<List<SessionSummary>>(path("sessions") + query({ limit, text: search.trim() || null }));
  if (mine === asked) listed.value = { sessions: page.data, hasMore: page.has_more };
}

export async function readMoreSessions(): Promise<void> {
  const { sessions } = listed.value;
  const after = sessions[sessions.length - 1]?.name;
  const page = await get<List<SessionSummary>>(path("sessions") + query({ limit: PAGE, after, text: text.trim() || null }));
  listed.value = { sessions: [...sessions, ...page.data], hasMore: page.has_more };
}

type Filing = Partial<Pick<SessionSummary, "title" | "folder" | "pinned">>;

/** Give a session a title, a folder or a pin. The list shows it at once. */
export async function file(name: string, filing: Filing): Promise<void> {
  const changed = (each: SessionSummary) => (each.name === name ? { ...each, ...filing } : each);
  listed.value = { ...listed.value, sessions: listed.value.sessions.map(changed) };
  await patch(path("sessions", name), filing);
  // The list may have been read in between.
  await readSessions();
}

export function folders(): string[] {
  return [...new Set(listed.value.sessions.map((each) => each.folder).filter(Boolean))].sort();
}

const begun = new Map<string, Promise<string>>();

/** The first words that were said in a session that nobody gave a title. */
export function beginning(name: string): Promise<string> {
  let found = begun.get(name);
  if (!found) {
    found = get<List<Turn>>(path("sessions", name, "turns") + query({ limit: 1 })).then((page) =>
      firstWords(page.data[0]?.messages.findLast((message) => message.role === "user")?.content ?? ""),
    );
    begun.set(name, found);
    found.catch(() => begun.delete(name));
  }
  return found;
}

export type ExportForm = "markdown" | "json" | "perdure";

/** Have a session as a file. It goes through a request of the page: a link could not carry the key. */
export async function download(session: { name: string; title: string; agent: string }, form: ExportForm): Promise<void> {
  const title = titleOf(session);
  const route = form === "perdure" ? path("sessions", session.name, "export") : path("sessions", session.name, "transcript");
  const response = await request(route + (form === "perdure" ? "" : query({ form: form === "json" ? "jsonl" : form })));
  let content = await response.blob();
  if (form === "json") {
    const lines = (await content.text()).split("\n").filter(Boolean);
    const messages = lines.map((line) => JSON.parse(line) as Message);
    content = new Blob([JSON.stringify({ name: session.name, title, messages }, null, 2) + "\n"]);
  }
  const suffix = { markdown: "md", json: "json", perdure: "perdure" }[form];
  const anchor = document.createElement("a");
  anchor.href = URL.createObjectURL(content);
  anchor.download = `${session.name}.${suffix}`;
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(anchor.href), 60_000);
  notify(texts.sessions.exported(`${session.name}.${suffix}`));
}
