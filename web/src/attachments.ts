/** What goes along with a message: text files and PDF files as text in it, pictures as parts of it. */

import { createContext } from "preact";
import { path, post, request, type Message } from "./api";
import { asModel, chosenModel } from "./models";
import { bytes, texts } from "./texts";

export interface Attachment {
  id: number;
  name: string;
  /** Of a text file or a PDF. */
  text: string;
  /** Of a picture: the file, and as a data: URL. */
  picture: { file: File; url: string } | null;
  pages: number;
  /** Once the server has counted them; null before, or where it cannot. */
  tokens: number | null;
  /** Whether its text is not there yet. */
  reading: boolean;
}

/** The conversation whose messages are drawn: pictures are asked for by its name. */
export const SessionName = createContext<string | null>(null);

const LARGEST_TEXT = 1 << 20;
const LARGEST_PDF = 64 << 20;
/** What fits into a message: in base64 it is a third larger. */
const LARGEST_PICTURE = 11 << 20;
const PICTURE = /^image\/(png|jpeg|webp|gif)$/;
export const ACCEPTED = "image/png,image/jpeg,image/webp,image/gif,application/pdf,text/*,.md,.json,.csv,.py,.ts,.js,.rs,.go,.c,.h,.cpp,.java,.toml,.yaml,.yml,.log";
let last = 0;

/** A file as it is shown at once; `read` then has its text and its count. */
export function begun(file: File): Attachment {
  const name = file.name || texts.composer.pasted;
  const isPicture = PICTURE.test(file.type);
  const most = isPicture ? LARGEST_PICTURE : isPdf(file) ? LARGEST_PDF : LARGEST_TEXT;
  if (file.size > most) throw new Error(texts.composer.tooLarge(name, bytes(most)));
  return { id: ++last, name, text: "", picture: isPicture ? { file, url: "" } : null, pages: 0, tokens: null, reading: true };
}

export async function read(file: File, attached: Attachment, session: string | null): Promise<Partial<Attachment>> {
  if (attached.picture) {
    const url = await dataUrl(file);
    const model = chosenModel(session)?.id ?? "";
    const { tokens } = await post<{ tokens: number }>("/v1/images/count", { image_url: url, model });
    return { picture: { file, url }, tokens, reading: false };
  }
  if (isPdf(file)) {
    const { text, pages } = await upload<{ text: string; pages: number }>("/v1/documents/text", file, session);
    return { text, pages, reading: false };
  }
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (text.includes("\0")) throw new TypeError();
    return { text, reading: false };
  } catch {
    throw new Error(texts.composer.notText(attached.name));
  }
}

/** The tokens of a text file as it stands in the message. */
export async function counted(attached: Attachment, session: string | null): Promise<number> {
  const body = { content: withFiles("", [attached]), add_special: false };
  return (await post<{ count: number }>(`/tokenize${asModel(session)}`, body)).count;
}

function isPdf(file: File): boolean {
  return file.type === "application/pdf" || /\.pdf$/i.test(file.name);
}

async function upload<T>(url: string, file: File, session: string | null): Promise<T> {
  const headers = { "content-type": "application/octet-stream" };
  return (await request(url + asModel(session), { method: "POST", headers, body: file })).json();
}

// Files as text.

type TextFile = Pick<Attachment, "name" | "text">;

/** A message with its files, each in a fence that nothing in it can close. */
export function withFiles(text: string, files: TextFile[]): string {
  const parts = files.map(({ name, text }) => {
    const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, text].filter(Boolean).join("\n\n");
}

const HEAD = /^([^\n`]{1,250}\.\w{1,12}):\n(`{3,})\n/;

/** The files that a message begins with, and what was typed behind them. */
export function filesIn(content: string): { files: TextFile[]; text: string } {
  const files: TextFile[] = [];
  let text = content;
  for (let head = HEAD.exec(text); head; head = HEAD.exec(text)) {
    const [opening, name, fence] = head as unknown as [string, string, string];
    const end = text.indexOf(`\n${fence}`, opening.length - 1);
    const behind = text.slice(end + 1 + fence.length);
    if (end < 0 || (behind && !behind.startsWith("\n\n"))) break;
    files.push({ name, text: text.slice(opening.length, end) });
    text = behind.slice(2);
  }
  return { files, text };
}

// Pictures.

/** Messages as the server takes them: pictures and sounds among the parts of the text, those that it has by
    their digests. */
export function wired(messages: Message[]): object[] {
  return messages.map(({ images, ...message }) => {
    if (!images?.length) return message;
    // The server counts characters, not their halves.
    const text = [...(message.content ?? "")];
    const parts: object[] = [];
    let at = 0;
    const say = (end: number) => {
      if (end > at) parts.push({ type: "text", text: text.slice(at, end).join("") });
      at = end;
    };
    for (const [place, source, kind] of images) {
      say(place);
      const url = source.startsWith("data:") ? source : `sha256:${source}`;
      if (kind === "sound") parts.push({ type: "input_audio", input_audio: { data: url, format: "wav" } });
      else parts.push({ type: "image_url", image_url: { url, ...(kind ? { detail: kind } : {}) } });
    }
    say(text.length);
    return { ...message, content: parts };
  });
}

/** The file of a picture or a sound in a message: one that is on its way, or one that the server keeps. */
export async function fileOf(session: string | null, source: string): Promise<Blob> {
  if (source.startsWith("data:")) {
    const [head = "", data = ""] = source.split(",");
    const decoded = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
    return new Blob([decoded], { type: /^data:([^;]+)/.exec(head)?.[1] ?? "" });
  }
  return (await request(path("sessions", session ?? "", "images", source))).blob();
}

function dataUrl(file: Blob): Promise<string> {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(String(reader.result));
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(file);
  });
}
