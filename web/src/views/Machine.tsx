/** The machine: models, slots and queue live, kept prefixes, the last requests, and how it went over time. */

import { useEffect, useState } from "preact/hooks";
import { get, path, query } from "../api";
import type { CatalogueEntry, List, Machine as Facts, MachineModel, RecentRequest, Report, ReportDay, Run } from "../api";
import { notifyError } from "../notices";
import { link } from "../route";
import { bytes, count, seconds, texts, when } from "../texts";
import { Plot } from "./Plot";

const words = texts.machine;
const EVERY = 1500;
const SAMPLES = 120;
const REQUESTS = 50;

interface Sample {
  busy: number;
  waiting: number;
}

export function Machine() {
  const [facts, show] = useState<Facts | null>(null);
  const [requests, list] = useState<RecentRequest[]>([]);
  const [samples, sample] = useState<Sample[]>([]);
  const [away, setAway] = useState(false);
  useEffect(() => {
    let open = true;
    let timer = 0;
    const look = async () => {
      if (!document.hidden) {
        try {
          const [machine, recent] = await Promise.all([
            get<Facts>(path("machine")),
            get<List<RecentRequest>>(path("requests") + query({ limit: REQUESTS })),
          ]);
          if (!open) return;
          show(machine);
          list(recent.data);
          const busy = machine.models.reduce((sum, model) => sum + model.slots.filter((slot) => slot.busy).length, 0);
          const waiting = machine.models.reduce((sum, model) => sum + model.waiting, 0);
          sample((before) => [...before, { busy, waiting }].slice(-SAMPLES));
          setAway(false);
        } catch {
          setAway(true);
        }
      }
      if (open) timer = window.setTimeout(() => void look(), EVERY);
    };
    void look();
    return () => {
      open = false;
      clearTimeout(timer);
    };
  }, []);
  const answered = [...requests].reverse();
  return (
    <div class="page">
      <header class="row">
        <h1>{words.title}</h1>
        {facts && <span class="hint">{words.version(facts.version)}</span>}
      </header>
      {away && (
        <p class="problem" role="status">
          {words.noAnswer}
        </p>
      )}
      <h2>{words.models}</h2>
      <div class="cards">{facts?.models.map((model) => <Model key={model.id} model={model} />)}</div>
      <h2>{words.plots}</h2>
      <div class="plots">
        <Plot name={words.plotSpeed} values={answered.map((each) => each.timings.decode_speed)} shown={(value) => value.toFixed(1)} />
        <Plot name={words.plotFirst} values={answered.map((each) => each.timings.queued + each.timings.prefill)} shown={seconds} />
        <Plot name={words.plotBusy} values={samples.map((each) => each.busy)} shown={count} />
        <Plot name={words.plotQueue} values={samples.map((each) => each.waiting)} shown={count} />
      </div>
      <ReportView asked={requests[0]?.number ?? 0} />
      <h2>{words.cache}</h2>
      <p class="hint">{words.cacheNote}</p>
      <Prefixes parent={null} asked={requests[0]?.number ?? 0} />
      <h2>{words.requests}</h2>
      <Requests requests={requests} />
      <h2>{words.catalogue}</h2>
      <p class="hint">{words.catalogueNote}</p>
      <Catalogue />
    </div>
  );
}

function Model({ model }: { model: MachineModel }) {
  const size = [model.size, model.nbytes === null ? "" : bytes(model.nbytes)].filter(Boolean).join(", ");
  const rows: [string, string][] = [
    [words.state, model.state],
    [words.architecture, model.architecture],
    [words.size, size],
    [words.context, words.contextTokens(model.n_ctx)],
    [words.kvType, model.kv_type],
    [words.devices, model.devices],
    [words.restarts, count(model.restarts)],
    [words.waiting, count(model.waiting)],
  ];
  return (
    <section class="card" aria-label={model.id}>
      <h3>{model.id}</h3>
      <dl>
        {rows
          .filter(([, value]) => value)
          .map(([name, value]) => (
            <div>
              <dt>{name}</dt>
              <dd>{value}</dd>
            </div>
          ))}
      </dl>
      <h4>{words.slots}</h4>
      <ul class="slots">
        {model.slots.map((slot, at) => (
          <li class={slot.busy ? "busy" : undefined}>
            <strong>{words.slot(at + 1)}</strong> {slot.busy ? words.busy : words.idle},{" "}
            {slot.own ? words.holds(slot.tokens ?? 0) : slot.busy ? words.others : words.empty}
            {slot.text && <span class="preview">{slot.text}</span>}
          </li>
        ))}
      </ul>
    </section>
  );
}

/** What follows a run of kept tokens, read when it is looked at. */
function Prefixes({ parent, asked }: { parent: string | null; asked: number }) {
  const [runs, show] = useState<Run[] | null>(null);
  const [more, setMore] = useState(false);
  const read = async (before: Run[]) => {
    const page = await get<List<Run>>(path("cache", "tree") + query({ parent, after: before.length, limit: REQUESTS }));
    show([...before, ...page.data]);
    setMore(page.has_more);
  };
  useEffect(() => {
    read([]).catch(() => show([]));
  }, [parent, parent === null ? asked : 0]);
  if (!runs) return null;
  if (!runs.length) return parent === null ? <p class="hint">{words.cacheEmpty}</p> : null;
  return (
    <ul class="prefixes">
      {runs.map((run) => (
        <Prefix key={run.id} run={run} />
      ))}
      {more && (
        <li>
          <button type="button" class="quiet" onClick={() => read(runs).catch(notifyError)}>
            {texts.sessions.more}
          </button>
        </li>
      )}
    </ul>
  );
}

function Prefix({ run }: { run: Run }) {
  const [open, unfold] = useState(run.start === 0);
  return (
    <li>
      <div class="prefix">
        {run.follows && (
          <button type="button" class="quiet" aria-expanded={open} aria-label={words.follow(run.text.slice(0, 40))} onClick={() => unfold(!open)}>
            {open ? "▾" : "▸"}
          </button>
        )}
        <code>{run.text}</code>
        <span class="figure">{words.holds(run.tokens)}</span>
        {Object.entries(run.nbytes).map(([tier, size]) => (
          <span class="figure">
            <i class={`dot tier-${tier}`} aria-hidden="true" />
            {tier} {bytes(size)}
          </span>
        ))}
        {run.labels.map((label) => (
          <span class="badge">{label}</span>
        ))}
      </div>
      {open && run.follows && <Prefixes parent={run.id} asked={0} />}
    </li>
  );
}

/** What was reused and what was computed again, as `perdure report` tells it. */
function ReportView({ asked }: { asked: number }) {
  const [report, show] = useState<Report | null>(null);
  useEffect(() => {
    get<Report>(path("report")).then(show, () => {});
  }, [asked]);
  if (!report) return null;
  const all = report.reused_tokens + report.computed_tokens;
  const share = all ? ` (${((100 * report.reused_tokens) / all).toFixed(1)}%)` : "";
  const bars: [string, number][] = [
    [words.reused, report.reused_tokens],
    [words.computed, report.computed_tokens],
  ];
  const misses = Object.entries(report.misses)
    .flatMap(([cause, clients]) => Object.entries(clients).map(([client, tokens]) => ({ cause, client, tokens })))
    .sort((one, other) => other.tokens - one.tokens);
  return (
    <section aria-label={words.report}>
      <h2>{words.report}</h2>
      <p class="hint">{words.reportSince(report.requests, when(report.since))}</p>
      <p>
        {words.reportReused(report.reused_tokens, share)}, {words.reportSaved(seconds(report.saved_seconds))}.
      </p>
      <ul class="meters" aria-label={words.reportBars}>
        {bars.map(([name, tokens]) => (
          <li>
            <span>{name}</span>
            <meter min={0} max={Math.max(1, all)} value={tokens} aria-label={name} />
            <span class="figure">{words.holds(tokens)}</span>
          </li>
        ))}
      </ul>
      <Week days={report.days} />
      {misses.length ? (
        <div class="wide" tabIndex={0} role="region" aria-label={words.reportMisses}>
          <table class="list">
            <caption>{words.reportMisses}</caption>
            <thead>
              <tr>
                {Object.values(words.missColumns).map((column) => (
                  <th scope="col">{column}</th>
                ))}
              </tr>
            </thead>
            <tbody>
              {misses.map((each) => (
                <tr key={`${each.cause} ${each.client}`}>
                  <th scope="row">{each.cause}</th>
                  <td>{each.client}</td>
                  <td class="fit">{count(each.tokens)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      ) : (
        <p class="hint">{words.reportNone}</p>
      )}
    </section>
  );
}

/** The last seven days: how much of each day's prompts was reused, and what was written. */
function Week({ days }: { days: ReportDay[] }) {
  const most = Math.max(1, ...days.map((day) => day.reused_tokens + day.computed_tokens));
  return (
    <div class="wide" tabIndex={0} role="region" aria-label={words.reportWeek}>
      <table class="list">
        <caption>{words.reportWeek}</caption>
        <thead>
          <tr>
            {Object.values(words.weekColumns).map((column) => (
              <th scope="col">{column}</th>
            ))}
          </tr>
        </thead>
        <tbody>
          {days.map((day) => (
            <tr key={day.day}>
              <th scope="row">{day.day}</th>
              <td>
                <meter min={0} max={most} value={day.reused_tokens} aria-label={words.reused} />
              </td>
              <td class="fit">{count(day.requests)}</td>
              <td class="fit">{count(day.reused_tokens)}</td>
              <td class="fit">{count(day.computed_tokens)}</td>
              <td class="fit">{seconds(day.saved_seconds)}</td>
              <td class="fit">{day.written_bytes === null ? "" : bytes(day.written_bytes)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Catalogue() {
  const [models, show] = useState<CatalogueEntry[]>([]);
  useEffect(() => {
    get<List<CatalogueEntry>>(path("catalogue")).then((page) => show(page.data), () => {});
  }, []);
  return (
    <div class="wide" tabIndex={0} role="region" aria-label={words.catalogue}>
      <table class="list">
        <thead>
          <tr>
            {Object.values(words.catalogueColumns).map((column) => (
              <th scope="col">{column}</th>
            ))}
          </tr>
        </thead>
        <tbody>
          {models.map((model) => (
            <tr key={model.name}>
              <th scope="row">
                {model.name} {model.recommended && <span class="badge">{words.best}</span>}
                {model.served && <span class="badge">{words.served}</span>}
              </th>
              <td class="fit">{words.fits[model.fit]}</td>
              <td class="fit">{bytes(model.nbytes)}</td>
              <td class="fit">{bytes(model.memory_bytes)}</td>
              <td class="fit">{count(model.context)}</td>
              <td>{model.purpose}</td>
              <td>{model.licence}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Requests({ requests }: { requests: RecentRequest[] }) {
  if (!requests.length) return <p class="hint">{words.requestsNone}</p>;
  return (
    <div class="wide" tabIndex={0} role="region" aria-label={words.requests}>
      <table class="list">
        <thead>
          <tr>
            {Object.values(words.columns).map((column) => (
              <th scope="col">{column}</th>
            ))}
          </tr>
        </thead>
        <tbody>
          {requests.map((each) => (
            <tr key={each.number}>
              <td class="fit">{when(each.ended)}</td>
              <td>{each.session && <a href={link({ view: "talk", session: each.session })}>{each.session}</a>}</td>
              <td>
                {Object.entries(each.reuse.tiers).map(([tier, tokens]) => (
                  <span class="figure">
                    <i class={`dot tier-${tier}`} aria-hidden="true" />
                    {count(tokens)} {tier}
                  </span>
                ))}
              </td>
              <td>{count(each.reuse.computed)}</td>
              <td class="fit">{seconds(each.timings.queued + each.timings.prefill)}</td>
              <td>{each.timings.decode_speed.toFixed(1)}</td>
              <td>{each.reuse.why}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
