/** What a session is called on the page: its title, else its name made readable. */

import type { SessionSummary } from "./api";
import { texts } from "./texts";

const TITLE = 60;
/** Characters of a title that is made of first words. */

const AGENTS: Record<string, string> = {
  "claude-cli": "Claude Code",
  opencode: "OpenCode",
  codex_cli_rs: "Codex",
  openai: "OpenAI SDK",
  asyncopenai: "OpenAI SDK",
  anthropic: "Anthropic SDK",
  asyncanthropic: "Anthropic SDK",
  "python-httpx": "Python",
  "python-requests": "Python",
  "ollama-python": "Ollama client",
};

/** The first words of a text, as a line that can stand in a list. */
export function firstWords(text: string): string {
  const line = text.trim().split("\n", 1)[0]!.trim().replace(/\s+/g, " ");
  if (line.length <= TITLE) return line.charAt(0).toUpperCase() + line.slice(1);
  const cut = line.slice(0, TITLE);
  const end = cut.lastIndexOf(" ");
  const words = end > TITLE / 2 ? cut.slice(0, end) : cut;
  return `${words.charAt(0).toUpperCase()}${words.slice(1)}…`;
}

/** A name without the marks that addresses want: hyphens between words, the number of a branch. */
export function readable(name: string): string {
  const base = name.replace(/~\d+$/, "");
  if (!/^[\p{L}\p{N}]+(-[\p{L}\p{N}]+)+$/u.test(base)) return base;
  return base.charAt(0).toUpperCase() + base.slice(1).replace(/-/g, " ");
}

/** The number of a branch, or 0 for the first line of a conversation. */
export function branchNumber(name: string): number {
  return Number(/~(\d+)$/.exec(name)?.[1] ?? 0);
}

type Named = Pick<SessionSummary, "name" | "agent" | "title">;

/** Whether an agent or a program made it, and no person. */
export function isForeign({ name, agent, title }: Named): boolean {
  if (title) return false;
  return (agent !== "" && agent !== "browser") || /^(conv|resp|chatcmpl)_/.test(name);
}

export function agentName(agent: string): string {
  return AGENTS[agent.toLowerCase()] ?? (agent || texts.nav.api);
}

export function titleOf(session: Named): string {
  const number = branchNumber(session.name);
  const title = session.title || (isOpaque(session.name) ? agentName(session.agent) : readable(session.name));
  return number ? `${title} · ${number}` : title;
}

/** Whether a name says nothing to a person: an id, made by a program. */
export function isOpaque(name: string): boolean {
  return /^(conv|resp|chatcmpl)_|:[a-z]*_?[\w-]{12,}|^[0-9a-f]{8}-[0-9a-f-]{20,}|^[0-9a-f]{20,}/i.test(name);
}

/** The part of the list that a time belongs to. */
export function age(updated: number, now = new Date()): "today" | "yesterday" | "week" | "older" {
  const midnight = new Date(now.getFullYear(), now.getMonth(), now.getDate()).getTime() / 1000;
  if (updated >= midnight) return "today";
  if (updated >= midnight - 86_400) return "yesterday";
  return updated >= midnight - 7 * 86_400 ? "week" : "older";
}
