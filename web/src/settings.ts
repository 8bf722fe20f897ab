/** Settings of a conversation, as they are edited and as they are sent. */

import { get, type List } from "./api";

/** A setting of sampling, as the server defines it. */
export interface Option {
  name: string;
  kind: "number" | "integer" | "texts" | "biases";
  low: number | null;
  high: number | null;
  default: string;
  help: string;
  common: boolean;
}

let loading: Promise<Option[]> | null = null;

/** The settings that the server has, asked for once. */
export function options(): Promise<Option[]> {
  loading ??= get<List<Option>>("/v1/options").then(
    (answer) => answer.data,
    (error) => {
      loading = null;
      throw error;
    },
  );
  return loading;
}

export interface Settings {
  /** Adapters of the server with their scales; null: as the server has it. */
  adapters: Record<string, number> | null;
  /** Settings of sampling by name: a number, or lines of text. */
  sampling: Record<string, number | string[]>;
  stop: string[];
  overflow: string;
  reasoning: string;
  reasoning_budget: number | null;
  output: "text" | "json" | "schema" | "regex";
  schema: string;
  regex: string;
  tools: string;
  logprobs: boolean;
}

export const DEFAULT_SCHEMA = `{
  "type": "object",
  "properties": {
    "answer": { "type": "string" }
  },
  "required": ["answer"]
}`;

export function defaults(): Settings {
  return {
    adapters: null,
    sampling: {},
    stop: [],
    overflow: "",
    reasoning: "",
    reasoning_budget: null,
    output: "text",
    schema: DEFAULT_SCHEMA,
    regex: "",
    tools: "",
    logprobs: false,
  };
}

const TOP = 5;
/** Alternatives that are asked for with each token. */

/** What a request says for these settings. A reply that `goesOn` from a text is held to no form of its own. */
export function asked(settings: Settings, goesOn = false): Record<string, unknown> {
  const extension: Record<string, unknown> = { keep_partial: true };
  if (settings.adapters) extension.adapters = settings.adapters;
  if (settings.overflow) extension.overflow = settings.overflow;
  if (settings.reasoning) extension.reasoning = settings.reasoning;
  if (settings.reasoning_budget !== null) extension.reasoning_budget = settings.reasoning_budget;
  const body: Record<string, unknown> = { perdure: extension };
  for (const [name, value] of Object.entries(settings.sampling))
    body[name] = name === "logit_bias" ? biases(value as string[]) : value;
  if (settings.stop.length) body.stop = settings.stop;
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: TOP });
  if (settings.tools.trim()) body.tools = JSON.parse(settings.tools);
  if (goesOn) body.continue_final_message = true;
  else if (settings.output === "json") body.response_format = { type: "json_object" };
  else if (settings.output === "schema")
    body.response_format = { type: "json_schema", json_schema: { name: "reply", schema: JSON.parse(settings.schema) } };
  else if (settings.output === "regex" && settings.regex) extension.regex = settings.regex;
  return body;
}

/** Lines such as `1234=-100`, as the server takes them. */
function biases(lines: string[]): Record<string, number> {
  const pairs = lines.map((line) => line.split("="));
  return Object.fromEntries(pairs.map(([token = "", bias]) => [token.trim(), Number(bias)]));
}

/** The settings that a turn was asked with, so that a conversation goes on as it was. */
export function fromTurn(said: Record<string, unknown>, known: Option[]): Settings {
  const found = defaults();
  for (const { name, kind } of known) {
    const value = said[name];
    if (value === undefined || value === null) continue;
    if (kind === "texts") found.sampling[name] = (value as unknown[]).map(String);
    else if (kind === "biases") found.sampling[name] = Object.entries(value).map(([token, bias]) => `${token}=${bias}`);
    else if (typeof value === "number") found.sampling[name] = value;
  }
  if (said.adapters && typeof said.adapters === "object") found.adapters = said.adapters as Record<string, number>;
  // Every turn has a seed; only one that was asked for is among its settings.
  if (typeof said.stop === "string") found.stop = [said.stop];
  else if (Array.isArray(said.stop)) found.stop = said.stop.map(String);
  if (typeof said.overflow === "string") found.overflow = said.overflow;
  if (typeof said.reasoning === "string" && said.reasoning !== "capture") found.reasoning = said.reasoning;
  if (typeof said.reasoning_budget === "number") found.reasoning_budget = said.reasoning_budget;
  if (said.schema && typeof said.schema === "object") {
    const whole = JSON.stringify(said.schema, null, 2);
    if (whole === '{\n  "type": "object"\n}') found.output = "json";
    else Object.assign(found, { output: "schema", schema: whole });
  } else if (typeof said.regex === "string") {
    Object.assign(found, { output: "regex", regex: said.regex });
  }
  if (Array.isArray(said.tools) && said.tools.length) found.tools = JSON.stringify(said.tools, null, 2);
  if (typeof said.logprobs === "number") found.logprobs = true;
  return found;
}
