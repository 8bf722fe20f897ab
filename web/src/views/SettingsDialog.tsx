/** Settings of a conversation. They go with every turn from now on. */

import { useEffect, useState } from "preact/hooks";
import type { Conversation } from "../conversation";
import { adapters, type Option, options, type Settings } from "../settings";
import { texts } from "../texts";
import { Dialog } from "./Dialog";

const words = texts.settings;
const LABELS: Record<string, string> = words.options;

function jsonProblem(text: string): string | null {
  try {
    JSON.parse(text);
    return null;
  } catch (error) {
    return words.notJson(error instanceof Error ? error.message : String(error));
  }
}

export function SettingsDialog({ talk, onClose }: { talk: Conversation; onClose: () => void }) {
  const [edited, edit] = useState<Settings>(talk.settings);
  const [system, writeSystem] = useState(talk.system ?? "");
  const change = (part: Partial<Settings>) => edit({ ...edited, ...part });
  const schemaProblem = edited.output === "schema" ? jsonProblem(edited.schema) : null;
  const toolsProblem = edited.tools.trim() ? jsonProblem(edited.tools) : null;
  const close = () => {
    if (!schemaProblem && !toolsProblem) {
      talk.settings = edited;
      if (talk.name === null) talk.system = system.trim() ? system : null;
      talk.changed();
    }
    onClose();
  };
  const [known, know] = useState<Option[]>([]);
  const [offered, offer] = useState<Record<string, number>>({});
  useEffect(() => {
    // Where it cannot be asked, the conversation itself says what is wrong.
    options().then(know, () => know([]));
    adapters().then(offer, () => offer({}));
  }, []);
  const set = (name: string, value: number | string[] | null) => {
    const sampling = { ...edited.sampling };
    if (value === null) delete sampling[name];
    else sampling[name] = value;
    change({ sampling });
  };
  const fields = (common: boolean) => (
    <div class="grid">
      {known
        .filter((option) => option.common === common)
        .map((option) => (
          <Field option={option} value={edited.sampling[option.name]} onChange={(value) => set(option.name, value)} />
        ))}
    </div>
  );
  return (
    <Dialog title={words.title} onClose={close}>
      <form
        class="settings"
        onSubmit={(event) => {
          event.preventDefault();
          event.currentTarget.closest("dialog")?.close();
        }}
      >
        <label>
          {words.system}
          <textarea
            rows={3}
            value={system}
            disabled={talk.name !== null}
            onInput={(event) => writeSystem(event.currentTarget.value)}
          />
        </label>
        {talk.name !== null && <p class="hint">{words.systemFixed}</p>}
        {Object.keys(offered).length > 0 && (
          <Choice
            label={words.adapter}
            options={{ "": words.usualAdapter, ...Object.fromEntries(Object.keys(offered).map((name) => [name, name])) }}
            value={Object.keys(edited.adapters ?? {})[0] ?? ""}
            onChange={(name) => change({ adapters: name ? { [name]: offered[name] ?? 1 } : null })}
          />
        )}
        <fieldset>
          <legend>{words.sampling}</legend>
          {fields(true)}
          <details>
            <summary>{words.further}</summary>
            {fields(false)}
          </details>
          <label>
            {words.stop}
            <textarea
              rows={2}
              value={edited.stop.join("\n")}
              onInput={(event) => change({ stop: event.currentTarget.value.split("\n").filter(Boolean) })}
            />
          </label>
        </fieldset>
        <fieldset>
          <legend>{words.context}</legend>
          <Choice label={words.overflow} options={words.overflows} value={edited.overflow} onChange={(overflow) => change({ overflow })} />
          <Choice label={words.reasoning} options={words.reasonings} value={edited.reasoning} onChange={(reasoning) => change({ reasoning })} />
          <label>
            {words.reasoning_budget}
            <input
              type="number"
              min={0}
              placeholder={words.placeholder}
              value={edited.reasoning_budget ?? ""}
              onInput={(event) => {
                const text = event.currentTarget.value;
                change({ reasoning_budget: text === "" ? null : Number(text) });
              }}
            />
          </label>
        </fieldset>
        <fieldset>
          <legend>{words.output}</legend>
          <Choice
            label={words.output}
            options={words.outputs}
            value={edited.output}
            onChange={(output) => change({ output: output as Settings["output"] })}
          />
          {edited.output === "schema" && (
            <JsonField label={words.schema} text={edited.schema} problem={schemaProblem} onChange={(schema) => change({ schema })} />
          )}
          {edited.output === "regex" && (
            <label>
              {words.regex}
              <input class="mono" value={edited.regex} onInput={(event) => change({ regex: event.currentTarget.value })} />
            </label>
          )}
          <JsonField label={words.tools} text={edited.tools} problem={toolsProblem} onChange={(tools) => change({ tools })} />
        </fieldset>
        <label class="check">
          <input type="checkbox" checked={edited.logprobs} onChange={(event) => change({ logprobs: event.currentTarget.checked })} />
          {words.logprobs}
        </label>
        <p class="hint">{words.logprobsNote}</p>
        <button type="submit" disabled={!!(schemaProblem || toolsProblem)}>
          {words.close}
        </button>
      </form>
    </Dialog>
  );
}

interface FieldGiven {
  option: Option;
  value: number | string[] | undefined;
  onChange: (value: number | string[] | null) => void;
}

/** A setting of sampling. What is left empty is as the server has it. */
function Field({ option, value, onChange }: FieldGiven) {
  const label = LABELS[option.name] ?? option.name.charAt(0).toUpperCase() + option.name.slice(1).replace(/_/g, " ");
  if (option.kind === "texts" || option.kind === "biases")
    return (
      <label title={option.help}>
        {label}
        <textarea
          rows={2}
          name={option.name}
          placeholder={option.kind === "biases" ? words.biases : words.placeholder}
          value={((value as string[] | undefined) ?? []).join("\n")}
          onInput={(event) => {
            const lines = event.currentTarget.value.split("\n").filter(Boolean);
            onChange(lines.length ? lines : null);
          }}
        />
      </label>
    );
  return (
    <label title={option.help}>
      {label}
      <input
        type="number"
        name={option.name}
        step={option.kind === "integer" ? 1 : "any"}
        min={option.low ?? undefined}
        max={option.high ?? undefined}
        placeholder={words.placeholder}
        value={(value as number | undefined) ?? ""}
        onInput={(event) => onChange(event.currentTarget.value === "" ? null : Number(event.currentTarget.value))}
      />
    </label>
  );
}

interface ChoiceGiven {
  label: string;
  options: Record<string, string>;
  value: string;
  onChange: (value: string) => void;
}

function Choice({ label, options, value, onChange }: ChoiceGiven) {
  return (
    <label>
      {label}
      <select value={value} onChange={(event) => onChange(event.currentTarget.value)}>
        {Object.entries(options).map(([name, text]) => (
          <option value={name}>{text}</option>
        ))}
      </select>
    </label>
  );
}

interface JsonGiven {
  label: string;
  text: string;
  problem: string | null;
  onChange: (text: string) => void;
}

function JsonField({ label, text, problem, onChange }: JsonGiven) {
  return (
    <div class="json">
      <label>
        {label}
        <textarea
          class="mono"
          rows={Math.min(14, Math.max(3, text.split("\n").length))}
          spellcheck={false}
          aria-invalid={problem !== null}
          value={text}
          onInput={(event) => onChange(event.currentTarget.value)}
        />
      </label>
      {problem && (
        <p class="problem" role="alert">
          {problem}
        </p>
      )}
      {text.trim() && (
        <button
          type="button"
          class="quiet"
          disabled={problem !== null}
          onClick={() => onChange(JSON.stringify(JSON.parse(text), null, 2))}
        >
          {words.format}
        </button>
      )}
    </div>
  );
}
