/** One conversation: its turns, the reply that is being written, and its place in the tree. */

import { ApiError, get, path, post, query, remove } from "./api";
import type { List, Message, PendingTurn, Reuse, SessionAnswer, Timings, Turn } from "./api";
import { wired } from "./attachments";
import { GROUP } from "./drawing";
import { asModel, keepModel } from "./models";
import { firstWords } from "./names";
import { notifyError } from "./notices";
import { open } from "./route";
import { file, readSessions } from "./sessions";
import { asked, defaults, fromTurn, options, type Settings } from "./settings";
import { Watched } from "./store";
import { ReplyText, streamReply, type Begun, type TokenLogprob } from "./stream";
import { texts } from "./texts";
import { writtenTitle } from "./titles";
import { loadTree, type Tree } from "./tree";

const FIRST = 30;
const PAGE = 100;
const MOST = 1000;
/** Turns that the server gives at once. */

/** The turn before the group that the first of the last `count` turns before `end` is in: whole groups are read. */
function groupBefore(end: number, count: number): number {
  return Math.max(0, Math.floor((end - count) / GROUP) * GROUP);
}

/** What is known of a reply only by who was there when it was written. */
export interface Told {
  reuse: Reuse;
  timings: Timings;
  logprobs: TokenLogprob[];
  /** The beginning of the text that was there before, and has no tokens. */
  lead: string;
}

export interface Pending {
  turn: number;
  said: Message[];
  reply: ReplyText | null;
  stopping: boolean;
  /** What went wrong; then nothing more comes. */
  error: string | null;
  /** Whether the server has the message: it has begun to answer. */
  accepted: boolean;
  /** Whether the conversation is too long for the context. */
  full: boolean;
  /** Whether the server keeps it, as the session's pending turn. */
  stored: boolean;
}

function wording(messages: Message[]): string {
  return JSON.stringify(messages.map((message) => [message.role, message.content]));
}

/** Tells other tabs that a conversation has changed. */
const channel = new BroadcastChannel("perdure");
const UNSENT = "perdure-unsent/";

/** Messages that got no reply, with the part of one that came: a reload of the tab keeps them. */
function readUnsent(name: string): Pending[] {
  const kept = JSON.parse(sessionStorage.getItem(UNSENT + name) ?? "[]") as Omit<Pending, "stopping">[];
  return kept.map((each) => ({ ...each, stopping: false, reply: each.reply && new ReplyText(each.reply) }));
}

function keepUnsent(name: string, unsent: Pending[]): void {
  const kept = unsent.map(({ reply, ...rest }) => ({ ...rest, reply: reply && { text: reply.text, reasoning: reply.reasoning } }));
  if (!kept.length) return sessionStorage.removeItem(UNSENT + name);
  try {
    sessionStorage.setItem(UNSENT + name, JSON.stringify(kept));
  } catch {
    // Pictures can be more than a tab may keep: then the words alone.
    const words = kept.map((each) => ({ ...each, said: each.said.map(({ images: _, ...message }) => message) }));
    sessionStorage.setItem(UNSENT + name, JSON.stringify(words));
  }
}

/** Of replies that this tab saw, by session and turn. */
const told = new Map<string, Told>();
/** The turn that is to be shown of a conversation that is about to be opened. */
let aim: { session: string; turn: number } | null = null;

export function openAt(session: string, turn: number): void {
  aim = { session, turn };
  open({ view: "talk", session });
}

export function sameTurn(one: Turn, other: Turn): boolean {
  return one.created === other.created && one.seed === other.seed && one.reply?.content === other.reply?.content;
}

export class Conversation extends Watched {
  system: string | null = null;
  title = "";
  /** Of the conversation, as the server counted them last. */
  tokens = 0;
  count = 0;
  turns: Turn[] = [];
  settings: Settings = defaults();
  pending: Pending | null = null;
  /** What failed before the pending turn and waits to be sent again. */
  unsent: Pending[] = [];
  tree: Tree | null = null;
  state: "new" | "loading" | "ready" | "gone" | "unreachable" = "new";
  busyElsewhere = false;
  /** The turn that is to be brought into view once it is there. */
  wanted: number | null = null;
  private fetching = false;
  private closed = false;
  private readonly stopListening: () => void;

  constructor(public name: string | null) {
    super();
    const heard = (event: MessageEvent) => {
      if (event.data === this.name) void this.refresh();
    };
    const shown = () => {
      if (!document.hidden) void this.refresh();
    };
    channel.addEventListener("message", heard);
    document.addEventListener("visibilitychange", shown);
    this.stopListening = () => {
      channel.removeEventListener("message", heard);
      document.removeEventListener("visibilitychange", shown);
    };
    if (aim !== null && aim.session === name) this.wanted = Math.max(1, aim.turn);
    aim = null;
    if (name !== null) {
      this.unsent = readUnsent(name);
      void this.load();
    }
  }

  close(): void {
    this.closed = true;
    this.stopListening();
  }

  get first(): number {
    return this.count - this.turns.length + 1;
  }

  get writing(): boolean {
    return this.pending !== null && this.pending.error === null;
  }

  toldOf(turn: number): Told | undefined {
    return told.get(`${this.name}/${turn}`);
  }

  // Reading.

  async load(): Promise<void> {
    this.state = "loading";
    this.changed();
    try {
      await this.read();
    } catch (error) {
      this.failed(error);
    }
  }

  private async read(): Promise<void> {
    const name = this.name!;
    const session = await get<SessionAnswer>(path("sessions", name));
    const after = groupBefore(session.turns, FIRST);
    const page = await get<List<Turn>>(path("sessions", name, "turns") + query({ after, limit: MOST }));
    const { pending } = await get<{ pending: PendingTurn | null }>(path("sessions", name, "pending"));
    const known = await options();
    if (this.closed || this.name !== name) return;
    this.system = session.system;
    this.title = session.title;
    this.tokens = session.tokens;
    this.turns = this.merged(page.data);
    this.count = after + page.data.length;
    this.settle();
    this.takeStored(pending);
    const last = page.data[page.data.length - 1];
    if (last && this.state !== "ready") this.settings = fromTurn(last.settings, known);
    this.state = "ready";
    this.changed();
    void this.readTree();
  }

  /** The last turns behind those that are known, as far as they are still the same. */
  private merged(last: Turn[]): Turn[] {
    const known = new Map(this.turns.map((turn) => [turn.turn, turn]));
    const found = last.map((turn) => {
      const before = known.get(turn.turn);
      return before && sameTurn(before, turn) ? before : turn;
    });
    // What led to a turn never changes: where the first one is the same, so are all before it.
    const first = found[0];
    if (!first || known.get(first.turn) !== first) return found;
    return [...this.turns.filter((turn) => turn.turn < first.turn), ...found];
  }

  /** Forget a turn that seemed to have failed and is there all the same: a server that stops keeps what it has. */
  private settle(): void {
    const isKept = (each: Pending) =>
      this.turns.some((turn) => turn.turn === each.turn && wording(turn.messages) === wording(each.said));
    if (this.pending !== null && this.pending.error !== null && isKept(this.pending)) this.pending = null;
    this.unsent = this.unsent.filter((each) => !isKept(each));
    this.writeUnsent();
  }

  /** Show what the server keeps of a turn that was interrupted, in the place of what this tab knows of it. */
  private takeStored(found: PendingTurn | null): void {
    if (this.writing) return;
    if (this.pending?.stored) this.pending = null;
    this.busyElsewhere = false;
    if (found === null) return;
    if (found.running) {
      this.busyElsewhere = true;
      void this.untilFree();
      return;
    }
    const isIt = (each: Pending) => wording(each.said) === wording(found.messages);
    if (this.pending !== null && !isIt(this.pending)) this.unsent = [...this.unsent, this.pending];
    this.unsent = this.unsent.filter((each) => !isIt(each));
    const { content, reasoning_content } = found.reply;
    const begun = { text: content ?? "", reasoning: reasoning_content ?? "" };
    this.pending = {
      turn: found.after + 1,
      said: found.messages,
      reply: begun.text || begun.reasoning ? new ReplyText(begun) : null,
      stopping: false,
      error: texts.talk.interrupted,
      accepted: true,
      full: false,
      stored: true,
    };
    this.writeUnsent();
  }

  /** What failed, and is in this tab alone: the turn that is pending among it. */
  private writeUnsent(): void {
    if (this.name === null) return;
    const last = this.pending !== null && this.pending.error !== null && !this.pending.stored ? [this.pending] : [];
    keepUnsent(this.name, [...this.unsent, ...last]);
  }

  /** Give it another title. Its name, which is its address, stays. */
  async rename(title: string): Promise<void> {
    if (this.name === null || !title.trim()) return;
    this.title = title.trim();
    this.changed();
    await file(this.name, { title: this.title });
    channel.postMessage(this.name);
  }

  /** Have the model write a title in the place of the first words. */
  private async writeTitle(name: string): Promise<void> {
    const title = await writtenTitle(name, this.title);
    if (title === null) return;
    if (this.name === name) {
      this.title = title;
      this.changed();
    } else await readSessions().catch(() => {});
    channel.postMessage(name);
  }

  private failed(error: unknown): void {
    if (error instanceof ApiError && error.status === 404) this.state = "gone";
    else if (error instanceof ApiError && error.status === 0) {
      this.state = "unreachable";
      void this.untilBack();
    } else notifyError(error);
    this.changed();
  }

  async readTree(): Promise<void> {
    if (this.name === null) return;
    const name = this.name;
    try {
      const tree = await loadTree(name);
      if (this.name !== name) return;
      this.tree = tree;
      this.changed();
    } catch (error) {
      if (!(error instanceof ApiError && [0, 404].includes(error.status))) notifyError(error);
    }
  }

  /** See whether another tab, or another program, has said something. */
  async refresh(): Promise<void> {
    if (this.name === null || this.writing || this.closed || this.state === "loading") return;
    try {
      await this.read();
    } catch (error) {
      this.failed(error);
    }
  }

  /** Bring a turn into view. The first one stands for what is before it. */
  reveal(turn: number): void {
    this.wanted = Math.max(1, turn);
    this.changed();
  }

  /** Read turns until one of them is there, if it is not being done. */
  async reach(turn: number): Promise<void> {
    while (turn < this.first && !this.closed) {
      const before = this.first;
      await this.earlier(Math.min(MOST - GROUP, before - turn + FIRST));
      if (this.first === before) return;
    }
  }

  async earlier(count = PAGE): Promise<void> {
    if (this.fetching || this.first <= 1 || this.name === null) return;
    this.fetching = true;
    const end = this.first - 1;
    const after = groupBefore(end, count);
    try {
      const page = await get<List<Turn>>(path("sessions", this.name, "turns") + query({ after, limit: end - after }));
      if (this.first - 1 === end) this.turns = [...page.data, ...this.turns];
      this.changed();
    } catch (error) {
      notifyError(error);
    } finally {
      this.fetching = false;
    }
  }

  // Talking.

  /** Whether the server has the message. Where it has not, it is the sender's to keep. */
  async send(said: Message[], words = said[0]?.content ?? ""): Promise<boolean> {
    if (this.name === null) await this.create(words);
    // What was interrupted becomes a turn before it.
    const before = this.pending?.stored && wording(this.pending.said) !== wording(said) ? 1 : 0;
    const kept = await this.say("turns", {}, said, this.count + before + 1);
    return kept || (this.pending?.accepted ?? true);
  }

  /** Have the turn answered that was interrupted: on behind what there is of it, or `again` from the start. */
  async resume(again = false): Promise<void> {
    const before = this.pending;
    if (!before?.stored || this.name === null) return;
    const pending = { ...before, reply: again ? null : before.reply, error: null };
    await this.follow(path("sessions", this.name, "pending"), { again }, pending, null);
  }

  /** Have the server forget the turn that was interrupted. */
  async discard(): Promise<void> {
    if (!this.pending?.stored || this.name === null) return;
    await remove(path("sessions", this.name, "pending")).catch(notifyError);
    await this.refresh();
  }

  /** Write on where the last reply was cut. */
  async goOn(): Promise<void> {
    const last = this.turns[this.turns.length - 1];
    if (!last?.reply) return;
    const begun = { text: last.reply.content ?? "", reasoning: last.reply.reasoning_content ?? "" };
    await this.say("edit", { turn: last.turn }, last.messages, last.turn, begun);
  }

  /** Say something else in a turn, or have another reply to it: in a new branch, so that nothing is lost. */
  async branch(turn: number, said: Message[], begun: Begun | null = null): Promise<void> {
    const from = this.name!;
    let name: string;
    try {
      name = await fork(from, turn - 1, this.tree?.sessions.map((each) => each.name));
    } catch (error) {
      notifyError(error);
      return;
    }
    this.turns = this.turns.slice(0, Math.max(0, turn - this.first));
    this.count = turn - 1;
    this.unsent = [];
    keepModel(from, name);
    this.name = name;
    for (const each of this.turns) {
      const known = told.get(`${from}/${each.turn}`);
      if (known) told.set(`${name}/${each.turn}`, known);
    }
    open({ view: "talk", session: name }, true);
    const kept = await this.say("turns", {}, said, turn, begun);
    if (!kept && this.name === name && !this.pending) {
      // Nothing was said there: a branch without an end of its own is none.
      await remove(path("sessions", name)).catch(notifyError);
      this.name = from;
      open({ view: "talk", session: from }, true);
      await this.refresh();
    }
  }

  async stop(): Promise<void> {
    if (!this.writing || this.name === null) return;
    this.pending!.stopping = true;
    this.changed();
    await post(path("sessions", this.name, "stop")).catch(notifyError);
  }

  /** Forget a reply that failed; its message may be sent again. */
  dismiss(failed: Pending): void {
    if (this.pending === failed) this.pending = null;
    this.unsent = this.unsent.filter((each) => each !== failed);
    this.writeUnsent();
    this.changed();
  }

  private async create(text: string): Promise<void> {
    const words = text.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? [];
    const base = words.slice(0, 6).join("-").slice(0, 48) || "conversation";
    const title = firstWords(text);
    const name = await numbered(base, "-", 1, (name) => post(path("sessions"), { name, system: this.system, title }));
    keepModel(null, name);
    this.name = name;
    this.title = title;
    this.state = "ready";
    open({ view: "talk", session: name }, true);
  }

  /** Whether the turn is now part of the conversation. */
  private async say(
    how: "turns" | "edit",
    body: object,
    said: Message[],
    turn: number,
    begun: Begun | null = null,
  ): Promise<boolean> {
    const name = this.name!;
    const goesOn = begun !== null && !!(begun.text || begun.reasoning);
    const messages = goesOn ? [...said, beginning(begun)] : said;
    const pending: Pending = {
      turn,
      said,
      reply: goesOn ? new ReplyText(begun) : null,
      stopping: false,
      error: null,
      accepted: false,
      full: false,
      stored: false,
    };
    const old = this.pending;
    if (old !== null && old.error !== null && !old.stored) this.unsent = [...this.unsent, old];
    const request = { ...body, messages: wired(messages), ...asked(this.settings, goesOn) };
    return this.follow(path("sessions", name, how), request, pending, begun);
  }

  /** Show a reply as it comes. Whether the turn is now part of the conversation. */
  private async follow(url: string, request: object, pending: Pending, begun: Begun | null): Promise<boolean> {
    const name = this.name!;
    const { turn } = pending;
    this.pending = pending;
    this.busyElsewhere = false;
    this.changed();
    try {
      const reply = await streamReply(url + asModel(name), request, begun, (reply) => {
        // What is continued is shown until it comes again, with its first tokens.
        if (reply.text || reply.reasoning || pending.reply === null) pending.reply = reply;
        pending.accepted = true;
        this.changed();
      });
      const extension = reply.extension;
      if (extension?.kept) {
        told.set(`${name}/${turn}`, { ...extension, logprobs: reply.logprobs, lead: begun?.text ?? "" });
        await this.read();
        this.pending = null;
        channel.postMessage(name);
        if (turn === 1) void this.writeTitle(name);
        return true;
      }
      if (pending.stopping && reply.text === (begun?.text ?? "")) {
        this.pending = null;
        return false;
      }
      // What there is of it may have been kept all the same.
      if (reply.error) void this.untilBack();
      const because = reply.text || reply.reasoning ? texts.talk.brokeOff : texts.talk.failed;
      pending.error = reply.error ? because(reply.error) : texts.talk.notKept(extension?.not_kept ?? "");
    } catch (error) {
      await this.lost(error, pending);
    } finally {
      this.writeUnsent();
      this.changed();
    }
    return false;
  }

  private async lost(error: unknown, pending: Pending): Promise<void> {
    if (error instanceof ApiError && error.status === 409 && error.code === "session_busy") {
      this.busyElsewhere = true;
      pending.error = error.message;
      void this.untilFree();
    } else if (error instanceof ApiError && error.status === 0) {
      pending.error = texts.talk.lost;
      void this.untilBack();
    } else {
      pending.full = error instanceof ApiError && error.code === "context_length_exceeded";
      pending.error = texts.talk.failed(error instanceof Error ? error.message : String(error));
    }
  }

  /** Wait for a server that is away, and read what there is once it is back. */
  private async untilBack(): Promise<void> {
    for (let tries = 0; !this.closed; tries += 1) {
      await pause(Math.min(250 * 2 ** tries, 5000));
      try {
        const ready = await fetch("/ready");
        if (!ready.ok) continue;
        await this.read();
        return;
      } catch (error) {
        if (error instanceof ApiError && error.status !== 0) {
          this.failed(error);
          return;
        }
      }
    }
  }

  private async untilFree(): Promise<void> {
    const before = this.count;
    for (let tries = 0; !this.closed && this.busyElsewhere; tries += 1) {
      await pause(Math.min(500 * 1.5 ** tries, 5000));
      await this.read().catch(() => {});
      if (this.count !== before) this.busyElsewhere = false;
    }
    this.changed();
  }
}

/** What a reply begins with, as the message that it goes on from. */
function beginning(begun: Begun): Message {
  const message: Message = { role: "assistant", content: begun.text };
  return begun.reasoning ? { ...message, reasoning_content: begun.reasoning } : message;
}

/** A fork under the name of its conversation, with the next number behind it. */
export function fork(session: string, turn: number, known: string[] = []): Promise<string> {
  const base = session.replace(/~\d+$/, "");
  const numbers = known.filter((name) => name.startsWith(`${base}~`)).map((name) => Number(name.slice(base.length + 1)));
  const first = Math.max(1, ...numbers.filter(Number.isInteger)) + 1;
  return numbered(base, "~", first, (name) => forkAs(session, turn, name));
}

export function forkAs(session: string, turn: number, name: string): Promise<unknown> {
  return post(path("sessions", session, "fork"), { name, turn });
}

const TRIES = 200;

/** Make something under the first free name: from `first` on with a number behind it; 1 is without. */
async function numbered(
  base: string,
  mark: string,
  first: number,
  make: (name: string) => Promise<unknown>,
): Promise<string> {
  for (let at = first; ; at += 1) {
    const name = at === 1 ? base : `${base}${mark}${at}`;
    try {
      await make(name);
      return name;
    } catch (error) {
      const taken = error instanceof ApiError && error.status === 409 && error.code !== "session_busy";
      if (!taken || at - first > TRIES) throw error;
    }
  }
}

function pause(milliseconds: number): Promise<void> {
  return new Promise((done) => setTimeout(done, milliseconds));
}
