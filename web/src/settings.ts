/** Settings of a conversation, as they are edited and as they are sent. */

export const NUMBERS = [
  "temperature",
  "top_p",
  "top_k",
  "min_p",
  "repeat_penalty",
  "frequency_penalty",
  "presence_penalty",
  "seed",
  "max_tokens",
] as const;
export type NumberName = (typeof NUMBERS)[number];

export interface Settings {
  numbers: Partial<Record<NumberName, number>>;
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
    numbers: {},
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
  if (settings.overflow) extension.overflow = settings.overflow;
  if (settings.reasoning) extension.reasoning = settings.reasoning;
  if (settings.reasoning_budget !== null) extension.reasoning_budget = settings.reasoning_budget;
  const body: Record<string, unknown> = { ...settings.numbers, perdure: extension };
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

/** The settings that a turn was asked with, so that a conversation goes on as it was. */
export function fromTurn(said: Record<string, unknown>): Settings {
  const found = defaults();
  for (const name of NUMBERS) if (typeof said[name] === "number") found.numbers[name] = said[name];
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
