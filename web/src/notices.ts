/** Short messages at the edge of the page, and deletions that can be taken back. */

import { remove } from "./api";
import { texts } from "./texts";
import { Value } from "./store";

export interface Notice {
  id: number;
  text: string;
  kind: "info" | "error";
  undo?: () => void;
  /** Called when it is closed by hand. */
  closed?: () => void;
}

const SHOWN = 6000;
const UNDO = 10_000;
/** Milliseconds in which a deletion can be taken back. */
let last = 0;
export const notices = new Value<Notice[]>([]);

export function notify(text: string, kind: Notice["kind"] = "info"): void {
  add({ text, kind }, SHOWN);
}

function add(notice: Omit<Notice, "id">, shown: number): number {
  const id = ++last;
  notices.value = [...notices.value, { id, ...notice }];
  setTimeout(() => dismiss(id), shown);
  return id;
}

export function notifyError(error: unknown): void {
  notify(error instanceof Error ? error.message : String(error), "error");
}

export function dismiss(id: number): void {
  notices.value = notices.value.filter((notice) => notice.id !== id);
}

/** Sessions that are on their way out: hidden, and deleted once nobody can take it back any more. */
export const leaving = new Value<ReadonlySet<string>>(new Set());
const pending = new Map<string, () => void>();

export function deleteSession(
  name: string,
  restored: () => void,
  done: () => void = () => {},
  title = name,
): void {
  leaving.value = new Set(leaving.value).add(name);
  const finish = (keepalive: boolean) => {
    if (!pending.delete(name)) return;
    clearTimeout(timer);
    remove(`/v1/sessions/${encodeURIComponent(name)}`, keepalive)
      .catch(notifyError)
      .finally(() => {
        without(name);
        done();
      });
  };
  const timer = setTimeout(() => finish(false), UNDO);
  pending.set(name, () => finish(true));
  const undo = () => {
    clearTimeout(timer);
    pending.delete(name);
    without(name);
    dismiss(notice);
    restored();
  };
  const closed = () => finish(false);
  const notice = add({ text: texts.sessions.deleted(title), kind: "info", undo, closed }, UNDO);
}

function without(name: string): void {
  const left = new Set(leaving.value);
  left.delete(name);
  leaving.value = left;
}

// What was deleted is deleted also when the tab is closed before the time to undo is over.
addEventListener("pagehide", () => {
  for (const finish of [...pending.values()]) finish();
});
