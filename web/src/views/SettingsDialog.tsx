/** Settings of a conversation. They go with every turn from now on. */

import { useEffect, useState } from "preact/hooks";
import type { Conversation } from "../conversation";
import { defaults, type Option, options, type Settings } from "../settings";
import { Select } from "../parts/Pop";
import { useWatched } from "../store";
import { count, texts } from "../texts";
import { setTitles, titlesOn } from "../titles";
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
  const { value: titles } = useWatched(titlesOn);
  const [edited, edit] = useState<Settings>(talk.settings);
  const change = (part: Partial<Settings>) => edit({ ...edited, ...part });
  const schemaProblem = edited.output === "schema" ? jsonProblem(edited.schema) : null;
  const toolsProblem = edited.tools.trim() ? jsonProblem(edited.tools) : null;
  const close = () => {
    if (!schemaProblem && !toolsProblem) {
      talk.settings = edited;
      talk.changed();
    }
    onClose();
  };
  const [known, know] = useState<Option[]>([]);
  useEffect(() => {
    // Where it cannot be asked, the conversation itself says what is wrong.
    options().then(know, () => know([]));
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
        <fieldset>
          <legend>{words.sampling}</legend>
          {fields(true)}
          <details>
            <summary>{words.further}</summary>
            {fields(false)}
          </details>
          <label class="field">
            <span class="field-label">{words.stop}</span>
            <textarea
              rows={2}
              aria-describedby="stop-note"
              value={edited.stop.join("\n")}
              onInput={(event) => change({ stop: event.currentTarget.value.split("\n").filter(Boolean) })}
            />
            <span id="stop-note" class="hint">
              {words.stopNote}
            </span>
          </label>
        </fieldset>
        <fieldset>
          <legend>{words.context}</legend>
          <Select label={words.overflow} hint={words.overflowNote} options={words.overflows} value={edited.overflow} onChange={(overflow) => change({ overflow })} />
          <Select label={words.reasoning} hint={words.reasoningNote} options={words.reasonings} value={edited.reasoning} onChange={(reasoning) => change({ reasoning })} />
          <label class="field">
            <span class="field-label">{words.reasoning_budget}</span>
            <input
              type="number"
              aria-describedby="budget-note"
              min={0}
              placeholder={words.placeholder}
              value={edited.reasoning_budget ?? ""}
              onInput={(event) => {
                const text = event.currentTarget.value;
                change({ reasoning_budget: text === "" ? null : Number(text) });
              }}
            />
            <span id="budget-note" class="hint">
              {words.budgetNote}
            </span>
          </label>
        </fieldset>
        <fieldset>
          <legend>{words.output}</legend>
          <Select
            label={words.format_}
            hint={words.outputNote}
            options={words.outputs}
            value={edited.output}
            onChange={(output) => change({ output: output as Settings["output"] })}
          />
          {edited.output === "schema" && (
            <JsonField label={words.schema} text={edited.schema} problem={schemaProblem} onChange={(schema) => change({ schema })} />
          )}
          {edited.output === "regex" && (
            <label class="field">
              <span class="field-label">{words.regex}</span>
              <input class="mono" value={edited.regex} onInput={(event) => change({ regex: event.currentTarget.value })} />
            </label>
          )}
          <JsonField label={words.tools} text={edited.tools} problem={toolsProblem} onChange={(tools) => change({ tools })} />
        </fieldset>
        <label class="check">
          <input type="checkbox" class="switch" checked={titles} onChange={(event) => setTitles(event.currentTarget.checked)} />
          <span>
            {words.titles}
            <span class="hint">{words.titlesNote}</span>
          </span>
        </label>
        <label class="check">
          <input type="checkbox" class="switch" checked={edited.logprobs} onChange={(event) => change({ logprobs: event.currentTarget.checked })} />
          <span>
            {words.logprobs}
            <span class="hint">{words.logprobsNote}</span>
          </span>
        </label>
        <footer class="dialog-foot">
          <button type="button" class="quiet" onClick={() => edit(defaults())}>
            {words.reset}
          </button>
          <button type="submit" disabled={!!(schemaProblem || toolsProblem)}>
            {words.close}
          </button>
        </footer>
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
  const note = `${option.name}-note`;
  const about = (
    <span id={note} class="hint">
      {option.help.charAt(0).toUpperCase() + option.help.slice(1)}. {range(option)}
    </span>
  );
  if (option.kind === "texts" || option.kind === "biases")
    return (
      <label class="field">
        <span class="field-label">{label}</span>
        <textarea
          rows={2}
          name={option.name}
          aria-describedby={note}
          placeholder={option.kind === "biases" ? words.biases : option.default}
          value={((value as string[] | undefined) ?? []).join("\n")}
          onInput={(event) => {
            const lines = event.currentTarget.value.split("\n").filter(Boolean);
            onChange(lines.length ? lines : null);
          }}
        />
        {about}
      </label>
    );
  return (
    <label class="field">
      <span class="field-label">{label}</span>
      <input
        type="number"
        name={option.name}
        aria-describedby={note}
        step={option.kind === "integer" ? 1 : "any"}
        min={option.low ?? undefined}
        max={option.high ?? undefined}
        placeholder={option.default}
        value={(value as number | undefined) ?? ""}
        onInput={(event) => onChange(event.currentTarget.value === "" ? null : Number(event.currentTarget.value))}
      />
      {about}
    </label>
  );
}

const UNBOUNDED = 1e6;
/** From here on, a limit is none that a person would meet. */

/** The values that a setting takes, in words. */
function range({ low, high, kind }: Option): string {
  if (kind === "texts" || kind === "biases" || low === null || high === null) return "";
  const least = low <= -UNBOUNDED ? null : low < 0.001 && low > 0 ? 0 : low;
  if (high >= UNBOUNDED) return least === null ? words.anyNumber : words.from(count(least));
  return words.range(count(least ?? 0), count(high));
}

/** The system message: chosen when a conversation begins, and shown from then on. */
export function SystemDialog({ talk, onClose }: { talk: Conversation; onClose: () => void }) {
  const [system, write] = useState(talk.system ?? "");
  const isFixed = talk.name !== null;
  const close = () => {
    if (!isFixed) {
      talk.system = system.trim() ? system : null;
      talk.changed();
    }
    onClose();
  };
  return (
    <Dialog title={words.system} onClose={close}>
      <form
        class="settings"
        onSubmit={(event) => {
          event.preventDefault();
          event.currentTarget.closest("dialog")?.close();
        }}
      >
        <label class="field">
          <span class="field-label">{words.systemLabel}</span>
          <textarea rows={6} value={system} disabled={isFixed} onInput={(event) => write(event.currentTarget.value)} />
        </label>
        <p class="hint">{isFixed ? words.systemFixed : words.systemNote}</p>
        <footer class="dialog-foot">
          <button type="submit">{words.close}</button>
        </footer>
      </form>
    </Dialog>
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
      <label class="field">
        <span class="field-label">{label}</span>
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
