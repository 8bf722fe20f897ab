/** Server-sent events of a reply, read as they come. */

import { ApiError, json, request, type Call, type Reuse, type Timings } from "./api";
import { texts } from "./texts";

export interface TokenLogprob {
  token: string;
  logprob: number;
  bytes: number[];
  top_logprobs: { token: string; logprob: number; bytes: number[] }[];
}

export interface Extension {
  reuse: Reuse;
  timings: Timings;
  seed: number;
  dropped: number;
  problems: string[];
  kept: boolean;
  not_kept: string | null;
}

interface CallPart {
  index: number;
  id?: string;
  function: { name?: string; arguments?: string };
}

interface Chunk {
  error?: { message: string; code: string | null };
  choices?: {
    delta: { content?: string; reasoning_content?: string; tool_calls?: CallPart[] };
    logprobs: { content: TokenLogprob[] } | null;
    finish_reason: string | null;
  }[];
  perdure?: Extension;
}

/** The beginning of a reply that is to go on. */
export interface Begun {
  text: string;
  reasoning: string;
}

/** A reply as far as it has come, with the beginning that it goes on from. */
export class ReplyText {
  text: string;
  reasoning: string;
  calls: Call[] = [];
  logprobs: TokenLogprob[] = [];
  finish: string | null = null;
  extension: Extension | null = null;
  error: string | null = null;

  constructor(begun: Begun | null = null) {
    this.text = begun?.text ?? "";
    this.reasoning = begun?.reasoning ?? "";
  }

  take(chunk: Chunk): void {
    if (chunk.error) this.error = chunk.error.message;
    for (const { delta, logprobs, finish_reason } of chunk.choices ?? []) {
      this.text += delta.content ?? "";
      this.reasoning += delta.reasoning_content ?? "";
      for (const part of delta.tool_calls ?? []) this.takeCall(part);
      if (logprobs) this.logprobs.push(...logprobs.content);
      if (finish_reason !== null) this.finish = finish_reason;
    }
    if (chunk.perdure) this.extension = chunk.perdure;
  }

  private takeCall(part: CallPart): void {
    const call = (this.calls[part.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    if (part.id) call.id = part.id;
    if (part.function.name) call.function.name = part.function.name;
    call.function.arguments += part.function.arguments ?? "";
  }
}

/** Splits bytes into the data of events, however the network has cut them. */
export class EventParser {
  private readonly decoder = new TextDecoder();
  /** What came since the last event ended: an event of megabytes is put together once. */
  private rest: string[] = [];

  push(bytes: Uint8Array): string[] {
    const text = this.decoder.decode(bytes, { stream: true });
    const isWhole = ((this.rest.at(-1)?.at(-1) ?? "") + text).includes("\n\n");
    if (text) this.rest.push(text);
    if (!isWhole) return [];
    const events = this.rest.join("").split("\n\n");
    this.rest = [events.pop() ?? ""];
    return events.flatMap((event) => {
      const data = event
        .split("\n")
        .filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).trimStart());
      return data.length ? [data.join("\n")] : [];
    });
  }
}

/** Read the reply to a request. `changed` is called whenever some of it has come. */
export async function streamReply(
  url: string,
  body: object,
  begun: Begun | null,
  changed: (reply: ReplyText) => void,
): Promise<ReplyText> {
  const response = await request(url, json({ ...body, stream: true }));
  const reply = new ReplyText(begun);
  changed(reply);
  const parser = new EventParser();
  const reader = response.body!.getReader();
  let done = false;
  while (!done) {
    let part;
    try {
      part = await reader.read();
    } catch {
      throw new ApiError(0, texts.talk.lost);
    }
    if (part.done) break;
    for (const data of parser.push(part.value)) {
      if (data === "[DONE]") done = true;
      else reply.take(JSON.parse(data));
    }
    changed(reply);
  }
  if (!done) throw new ApiError(0, texts.talk.lost);
  return reply;
}
