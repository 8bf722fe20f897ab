/** Which model answers, in the header: the models of the server, their adapters, and the way to a better one. */

import { ChevronDown, CircleAlert, Download, Sparkles } from "lucide-preact";
import { useState } from "preact/hooks";
import type { ModelName } from "../api";
import type { Conversation } from "../conversation";
import { adaptersOf, bases, chooseModel, chosenModel, models, readModels } from "../models";
import { Menu, MenuItem } from "../parts/Pop";
import { useWatched } from "../store";
import { bytes, count, middle, texts } from "../texts";
import { BetterModel } from "./BetterModel";

const words = texts.models;

export function ModelPicker({ talk }: { talk: Conversation }) {
  useWatched(models);
  useWatched(talk);
  const [better, showBetter] = useState(false);
  const current = chosenModel(talk.name);
  if (!current) return null;
  const adapters = adaptersOf(current.id);
  const adapter = Object.keys(talk.settings.adapters ?? {})[0] ?? "";
  const useAdapter = (name: string) => {
    talk.settings = { ...talk.settings, adapters: name ? { [name]: adapters[name] ?? 1 } : null };
    talk.changed();
  };
  return (
    <>
      <Menu
        label={words.choose(adapter ? `${current.id}, ${adapter}` : current.id)}
        class="model-picker"
        onOpen={() => void readModels().catch(() => {})}
        face={
          <>
            <span class="item-text model">{middle(adapter ? `${current.id} + ${adapter}` : current.id)}</span>
            <ChevronDown size={15} aria-hidden="true" />
          </>
        }
      >
        {(close) => (
          <>
            <div role="group" aria-label={words.title}>
              {bases().map((model) => (
                <MenuItem
                  checked={model.id === current.id}
                  onPick={() => {
                    close();
                    if (model.id === current.id) return;
                    chooseModel(talk.name, model.id);
                    useAdapter("");
                  }}
                >
                  <strong>{model.id}</strong>
                  <span class="hint">
                    <State model={model} /> {facts(model)}
                  </span>
                </MenuItem>
              ))}
            </div>
            {Object.keys(adapters).length > 0 && (
              <div role="group" aria-label={texts.settings.adapter} class="pop-part">
                {["", ...Object.keys(adapters)].map((name) => (
                  <MenuItem
                    checked={name === adapter}
                    onPick={() => {
                      close();
                      useAdapter(name);
                    }}
                  >
                    {name || words.noAdapter}
                    {name && <span class="hint">{words.adapter(adapters[name]!)}</span>}
                  </MenuItem>
                ))}
              </div>
            )}
            <div role="group" aria-label={words.better} class="pop-part">
              <MenuItem
                icon={Sparkles}
                onPick={() => {
                  close();
                  showBetter(true);
                }}
              >
                {words.better}
              </MenuItem>
            </div>
          </>
        )}
      </Menu>
      {better && <BetterModel session={talk.name} onClose={() => showBetter(false)} />}
    </>
  );
}

function facts(model: ModelName): string {
  return [words.context(count(model.n_ctx)), model.memory_bytes ? bytes(model.memory_bytes) : ""].filter(Boolean).join(", ");
}

function State({ model }: { model: ModelName }) {
  const state = model.error !== null && model.state !== "ready" ? "failed" : model.state;
  const fails = state === "failed" || (state === "unloaded" && model.fit === "not");
  return (
    <span class={fails ? "state failed" : `state ${state}`}>
      {fails ? <CircleAlert size={12} aria-hidden="true" /> : state === "loading" ? <Download size={12} aria-hidden="true" /> : null}
      {state === "unloaded" ? words.fits[model.fit] : words.states[state]}
    </span>
  );
}
