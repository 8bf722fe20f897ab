/** Models to choose from: what fits this machine, how large it is, and the way to have it. */

import { Check, Copy as CopyIcon, Download } from "lucide-preact";
import { useEffect, useState } from "preact/hooks";
import { get, path, post, remove, type Catalogue as Models, type CatalogueEntry, type Pull } from "../api";
import { chooseModel, readModels } from "../models";
import { notify, notifyError } from "../notices";
import { IconButton } from "../parts/Icon";
import { bytes, count, texts } from "../texts";
import { Dialog } from "./Dialog";

const words = texts.models;
const EVERY = 1000;

export function BetterModel({ session, onClose }: { session: string | null; onClose: () => void }) {
  return (
    <Dialog title={words.better} onClose={onClose} wide>
      <p class="hint">{words.betterNote}</p>
      <Catalogue session={session} onUse={onClose} />
    </Dialog>
  );
}

/** The models, and the latest download of the server: null for those who may not have it fetch anything. */
function useModels(): [CatalogueEntry[], Pull | null | undefined, (pull: Pull) => void] {
  const [models, list] = useState<CatalogueEntry[]>([]);
  const [pull, show] = useState<Pull | null | undefined>(null);
  const running = pull?.state === "running" && pull.model;
  useEffect(() => {
    let open = true;
    get<Models>(path("catalogue")).then((known) => {
      if (!open) return;
      list(known.data);
      show(known.may_pull ? (known.pull ?? undefined) : null);
    }, () => {});
    // What has come is one of the server's models.
    if (pull?.serves) void readModels().catch(() => {});
    return () => {
      open = false;
    };
  }, [pull?.serves]);
  useEffect(() => {
    if (!running) return;
    const timer = window.setInterval(() => void get<Pull>(path("models", "pull")).then(show, () => {}), EVERY);
    return () => clearInterval(timer);
  }, [running]);
  return [models, pull, show];
}

interface CatalogueGiven {
  session?: string | null;
  /** The model that was fetched is chosen, for this conversation and for new ones. */
  onUse?: () => void;
}

export function Catalogue({ session = null, onUse = () => {} }: CatalogueGiven) {
  const [all, showAll] = useState(false);
  const [models, pull, show] = useModels();
  const fitting = models.filter((model) => model.fit !== "not");
  const shown = all || !fitting.length ? models : fitting;
  const use = (model: string) =>
    void readModels().then(() => {
      chooseModel(session, model);
      notify(words.used(model));
      onUse();
    }, notifyError);
  const start = (name: string) => void post<Pull>(path("models", "pull"), { model: name }).then(show, notifyError);
  const stop = () => void remove(path("models", "pull")).then(() => pull && show({ ...pull, state: "cancelled" }), notifyError);
  return (
    <>
      <ul class="models" aria-label={texts.machine.catalogue}>
        {shown.map((model) => (
          <li key={model.name} class={`model-card ${model.fit}`}>
            <div class="model-name">
              <h3>{model.name}</h3>
              {model.recommended && <span class="badge best">{texts.machine.best}</span>}
              {model.served && <span class="badge on">{texts.machine.served}</span>}
              <span class={`badge fit-${model.fit}`}>{texts.machine.fits[model.fit]}</span>
            </div>
            <p>{model.purpose}</p>
            <dl class="facts">
              <Fact name={words.download} value={bytes(model.nbytes)} />
              <Fact name={words.memory} value={bytes(model.memory_bytes)} />
              <Fact name={texts.machine.context} value={count(model.context)} />
              <Fact name={words.licence} value={model.licence} />
            </dl>
            <Way model={model} pull={pull} onStart={start} onStop={stop} onUse={use} />
          </li>
        ))}
      </ul>
      {fitting.length > 0 && fitting.length < models.length && (
        <button type="button" class="quiet" onClick={() => showAll(!all)}>
          {all ? words.onlyFitting : words.showAll(models.length - fitting.length)}
        </button>
      )}
    </>
  );
}

function Fact({ name, value }: { name: string; value: string }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{value}</dd>
    </div>
  );
}

interface WayGiven {
  model: CatalogueEntry;
  pull: Pull | null | undefined;
  onStart: (name: string) => void;
  onStop: () => void;
  onUse: (model: string) => void;
}

/** A button for those whose key may have the server fetch something; the command for everybody else. */
function Way({ model, pull, onStart, onStop, onUse }: WayGiven) {
  const mine = pull?.model === model.name ? pull : null;
  if (mine?.state === "done" && mine.serves)
    return (
      <div class="way">
        <p class="hint">
          <Check size={15} aria-hidden="true" /> {words.served}
        </p>
        <button type="button" onClick={() => onUse(mine.serves)}>
          {words.use}
        </button>
      </div>
    );
  if (model.served) return null;
  if (mine?.state === "running") {
    const share = mine.total ? Math.floor((100 * mine.completed) / mine.total) : 0;
    return (
      <div class="way">
        <span class="bar" role="progressbar" aria-label={words.fetching(model.name)} aria-valuenow={share} aria-valuemin={0} aria-valuemax={100}>
          <span style={{ width: `${share}%` }} />
        </span>
        <span class="hint">
          {share}% {mine.total ? words.of(bytes(mine.completed), bytes(mine.total)) : ""}
        </span>
        <button type="button" class="plain-button" onClick={onStop}>
          {texts.talk.cancel}
        </button>
      </div>
    );
  }
  if (mine?.state === "done")
    return (
      <div class="way">
        <p class="hint">
          <Check size={15} aria-hidden="true" /> {words.done}
        </p>
        {mine.error && <p class="problem">{mine.error}</p>}
        <Command text={`perdure serve ${model.name}`} />
      </div>
    );
  if (pull === null || model.fit === "not") return <div class="way">{model.fit !== "not" && <Command text={`perdure page ${model.name}`} />}</div>;
  return (
    <div class="way">
      {mine?.error && <p class="problem">{mine.error}</p>}
      <button type="button" class="plain-button" disabled={pull?.state === "running"} onClick={() => onStart(model.name)}>
        <Download size={16} aria-hidden="true" /> {mine ? words.resume : words.get}
      </button>
    </div>
  );
}

function Command({ text }: { text: string }) {
  const copy = () => {
    if (!navigator.clipboard) return notify(texts.errors.clipboard, "error");
    void navigator.clipboard.writeText(text).then(() => notify(words.copied), () => notify(texts.errors.clipboard, "error"));
  };
  return (
    <span class="command">
      <code>{text}</code>
      <IconButton icon={CopyIcon} label={words.copy(text)} onClick={copy} />
    </span>
  );
}
