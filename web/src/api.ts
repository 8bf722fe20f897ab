/** The server's routes, typed. Every request goes to the origin that the page came from. */

import { Value } from "./store";
import { texts } from "./texts";

export interface Call {
  id: string;
  type: "function";
  function: { name: string; arguments: string };
}

/** A picture or a sound of a message: the number of characters before it, its digest (while it is on its way a
    data: URL), and what it is unless it is a picture in full detail. */
export type Medium = [place: number, source: string, kind?: "low" | "sound"];

export interface Message {
  role: string;
  content: string | null;
  name?: string | null;
  tool_call_id?: string | null;
  reasoning_content?: string | null;
  tool_calls?: Call[] | null;
  images?: Medium[] | null;
}

export interface Reuse {
  tiers: Record<string, number>;
  /** How long each tier took to bring its tokens back. */
  seconds: Record<string, number>;
  computed: number;
  why: string;
}

export interface Timings {
  queued: number;
  prefill: number;
  decode: number;
  prefilled_tokens: number;
  decoded_tokens: number;
  prefill_speed: number;
  decode_speed: number;
  /** Tokens that were guessed ahead, those of them that were right, and those that a grammar forced. */
  drafted_tokens?: number;
  accepted_tokens?: number;
  forced_tokens?: number;
}

export interface Turn {
  turn: number;
  kind: string;
  messages: Message[];
  reply: Message | null;
  finish_reason: string;
  usage: Record<string, number>;
  /** Why not more of its prompt was reused. */
  why: string;
  dropped: number;
  seed: number;
  created: number;
  settings: Record<string, unknown>;
}

export interface Origin {
  how: string;
  session: string | null;
  turn: number | null;
}

export interface SessionSummary {
  name: string;
  kind: string;
  turns: number;
  created: number;
  updated: number;
  origin: Origin | null;
  /** The program that made it, as it calls itself. */
  agent: string;
  /** The session that it was started from, if any. */
  parent: string;
  /** Of its last turn; empty before the first one. */
  model: string;
  tokens: number;
  /** What a person calls it, and where it is filed. */
  title: string;
  folder: string;
  pinned: boolean;
}

/** What the cache saved on one day of UTC. */
export interface ReportDay extends ReportSums {
  day: string;
  /** State that was written to the disk and shared tiers; null where that is not for this key to see. */
  written_bytes: number | null;
}

/** What the cache saved since the start of the server, and by day for the last seven. */
export interface Report extends ReportSums {
  since: number;
  days: ReportDay[];
}

export interface ReportSums {
  requests: number;
  reused_tokens: number;
  computed_tokens: number;
  prefill_seconds: number;
  saved_seconds: number;
  /** Tokens computed again, by cause and then by client. */
  misses: Record<string, Record<string, number>>;
}

export interface SessionAnswer {
  name: string;
  kind: string;
  system: string | null;
  turns: number;
  tokens: number;
  origin: Origin | null;
  title: string;
}

/** What was asked of a session and is no turn of it: its reply is being written, or was interrupted. */
export interface PendingTurn {
  after: number;
  messages: Message[];
  reply: Message;
  ended: string;
  running: boolean;
}

export interface SessionState {
  awake: boolean;
  tokens: number;
  tiers: Record<string, { tokens: number; nbytes: number }>;
  turn_bytes: number;
}

export interface TreeTurn {
  id: string;
  parent: string | null;
  turn: number;
  kind: string;
  said: string;
  reply: string;
  finish_reason: string;
  created: number;
}

export interface Branch {
  name: string;
  at: string;
  turns: number;
  updated: number;
}

export interface Place {
  address: string;
  label: string;
  kind: string;
  note: string;
  at: string;
}

export interface TreePage {
  data: TreeTurn[];
  has_more: boolean;
  sessions: Branch[];
  memories: Place[];
}

export interface Plan {
  tiers: Record<string, number>;
  blocks: number;
  nbytes: number;
  computed: number;
}

export interface Slot {
  busy: boolean;
  own: boolean;
  tokens: number | null;
  text: string | null;
}

export interface MachineModel {
  id: string;
  state: string;
  restarts: number;
  architecture: string;
  size: string;
  nbytes: number | null;
  n_ctx: number;
  kv_type: string;
  devices: string;
  waiting: number;
  slots: Slot[];
}

/** A name that a model can be asked for by, and the adapter that this name adds to it. */
export interface ModelName {
  id: string;
  n_ctx: number;
  architecture: string;
  state: "unloaded" | "loading" | "ready" | "unloading";
  memory_bytes: number | null;
  /** Whether it can be loaded beside what is loaded, in place of another, or not at all. */
  fit: "fits" | "in_turn" | "not";
  /** What kept it from being loaded, the last time that it was tried. */
  error: string | null;
  adapter: { name: string; scale: number } | null;
}

export interface Machine {
  version: string;
  started: number;
  needs_key: boolean;
  models: MachineModel[];
}

export interface RecentRequest {
  number: number;
  ended: number;
  session: string | null;
  finish_reason: string;
  usage: { prompt_tokens: number; completion_tokens: number };
  reuse: Reuse;
  timings: Timings;
}

export interface Run {
  id: string;
  start: number;
  tokens: number;
  text: string;
  blocks: number;
  nbytes: Record<string, number>;
  labels: string[];
  follows: boolean;
}

/** What a key has used on one day. */
export interface UsageDay {
  key: string;
  namespace: string;
  day: string;
  requests: number;
  prompt_tokens: number;
  cached_tokens: number;
  completion_tokens: number;
  tokens_per_day: number | null;
}

/** A model with a short name, and whether the server's machine can run it. */
export interface CatalogueEntry {
  name: string;
  aliases: string[];
  fit: "fits" | "tight" | "not";
  recommended: boolean;
  served: boolean;
  nbytes: number;
  memory_bytes: number;
  context: number;
  purpose: string;
  licence: string;
}

/** How far the server is with fetching a model. */
export interface Pull {
  model: string;
  state: "running" | "done" | "failed" | "cancelled";
  completed: number;
  total: number | null;
  error: string;
  serves: string;
}

export interface Catalogue {
  data: CatalogueEntry[];
  may_pull: boolean;
  pull: Pull | null;
}

export interface List<T> {
  data: T[];
  has_more: boolean;
}

/** An answer that is an error, or none at all: then `status` is 0. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly code: string | null = null,
    readonly param: string | null = null,
  ) {
    super(message);
  }
}

const KEY = "perdure-key";
type AskKey = (wrong: boolean) => Promise<string>;
let offer: (ask: AskKey) => void;
/** What asks for a key. A refusal can come before it is on the screen, and waits for it. */
const wantsKey = new Promise<AskKey>((resolve) => (offer = resolve));
let asking: Promise<string> | null = null;
/** Whether a key is in use, which can be changed. */
export const hasKey = new Value(sessionStorage.getItem(KEY) !== null);

/** What asks the user for a key. It is asked once, however many requests wait for it. */
export function onKeyWanted(ask: AskKey): void {
  offer(ask);
}

async function newKey(wrong: boolean): Promise<void> {
  asking ??= wantsKey.then((ask) => ask(wrong)).finally(() => {
    asking = null;
  });
  sessionStorage.setItem(KEY, await asking);
  hasKey.value = true;
}

/** Ask for another key, and begin anew with it: what is shown belongs to the one before. */
export async function changeKey(): Promise<void> {
  await newKey(false);
  location.hash = "#/";
  location.reload();
}

export function path(...parts: string[]): string {
  return "/v1/" + parts.map(encodeURIComponent).join("/");
}

export function query(values: Record<string, string | number | null | undefined>): string {
  const given = Object.entries(values).filter(([, value]) => value !== null && value !== undefined);
  return given.length ? "?" + new URLSearchParams(given.map(([name, value]) => [name, String(value)])) : "";
}

/** A response whose status is good. Where a key is missing or wrong, the user is asked and it goes again. */
export async function request(url: string, init: RequestInit = {}): Promise<Response> {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = new Headers(init.headers);
    if (key !== null) headers.set("authorization", `Bearer ${key}`);
    let response: Response;
    try {
      response = await fetch(url, { ...init, headers, credentials: "omit", redirect: "error" });
    } catch (error) {
      if (error instanceof DOMException && error.name === "AbortError") throw error;
      throw new ApiError(0, texts.errors.network);
    }
    if (response.ok) return response;
    if (response.status === 401) {
      // Another request may have got a new key meanwhile.
      if (key === sessionStorage.getItem(KEY)) await newKey(key !== null);
      continue;
    }
    throw await refusal(response);
  }
}

async function refusal(response: Response): Promise<ApiError> {
  try {
    const { error } = await response.json();
    return new ApiError(response.status, String(error.message), error.code, error.param);
  } catch {
    return new ApiError(response.status, texts.errors.unexpected(response.status));
  }
}

export async function get<T>(url: string, signal?: AbortSignal): Promise<T> {
  return (await request(url, signal ? { signal } : {})).json();
}

export async function post<T>(url: string, body: unknown = {}): Promise<T> {
  return (await request(url, json(body))).json();
}

export async function remove(url: string, keepalive = false): Promise<void> {
  await request(url, { method: "DELETE", keepalive });
}

export async function patch<T>(url: string, body: unknown): Promise<T> {
  return (await request(url, { ...json(body), method: "PATCH" })).json();
}

export function json(body: unknown): RequestInit {
  return { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
}
