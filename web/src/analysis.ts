/** What the model did for a reply, as the server tells it while it is computed. */

import { ApiError, json, path, request } from "./api";
import { EventParser } from "./stream";
import { texts } from "./texts";

export interface Progress {
  stage: string;
  done: number;
  /** 0 where it is not known. */
  total: number;
}

export interface Analysis {
  tokens: number;
  reply_tokens: number;
  /** What is missing, and why. */
  notes: string[];
  /** A page of its own, which has a script: it is shown in a sandbox. */
  html: string;
}

type Told =
  | ({ type: "progress" } & Progress)
  | ({ type: "analysis" } & Analysis)
  | { type: "error"; error: { message: string; code: string | null } };

/** The analysis of a turn. `changed` is told how far it is; to abort `signal` ends it on the server too. */
export async function readAnalysis(
  session: string,
  turn: number,
  changed: (progress: Progress) => void,
  signal: AbortSignal,
): Promise<Analysis> {
  const url = path("sessions", session, "turns", String(turn), "analysis");
  const response = await request(url, { ...json({ stream: true }), signal });
  const parser = new EventParser();
  const reader = response.body!.getReader();
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (signal.aborted) throw error;
      break;
    }
    if (part.done) break;
    for (const data of parser.push(part.value)) {
      const told: Told = JSON.parse(data);
      if (told.type === "analysis") return told;
      if (told.type === "error") throw new ApiError(0, told.error.message, told.error.code);
      changed(told);
    }
  }
  throw new ApiError(0, texts.inside.lost);
}
