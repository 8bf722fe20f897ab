/** Titles that the model writes, and whether it is to. */

import { path, post } from "./api";
import { Value } from "./store";

const KEPT = "perdure-titles";

export const titlesOn = new Value(localStorage.getItem(KEPT) !== "off");

export function setTitles(on: boolean): void {
  localStorage.setItem(KEPT, on ? "on" : "off");
  titlesOn.value = on;
}

/** A title in the place of the first words, once the model has nothing else to do; null where it wrote none. */
export async function writtenTitle(session: string, before: string): Promise<string | null> {
  if (!titlesOn.value) return null;
  try {
    const answer = await post<{ title: string; written: boolean }>(path("sessions", session, "title"), { instead_of: before });
    return answer.written ? answer.title : null;
  } catch {
    // The first words do as well.
    return null;
  }
}
