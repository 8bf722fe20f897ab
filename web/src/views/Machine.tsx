/** The machine: models, slots and queue live, kept prefixes, the last requests, and how it went over time. */

import { ChevronRight } from "lucide-preact";
import { useEffect, useState } from "preact/hooks";
import { get, path, query } from "../api";
import type { List, Machine as Facts, MachineModel, RecentRequest, Report, ReportDay, Run } from "../api";
import { notifyError } from "../notices";
import { isOpaque, readable, titleOf } from "../names";
import { link } from "../route";
import { listed } from "../sessions";
import { bytes, count, decimal, middle, seconds, texts, when } from "../texts";
import { plainPrompt } from "../prompt";
import { Coded } from "../parts/Coded";
import { Meter, Table, Tile } from "../parts/Table";
import { Catalogue } from "./BetterModel";
import { Plot } from "./Plot";

const words = texts.machine;
const EVERY = 1500;
const SAMPLES = 120;
const REQUESTS = 50;
const { slot, memory, disk, shared } = texts.reuse;
const FROM: Record<string, string> = { slot, memory, disk, shared };

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
        <Plot name={words.plotSpeed} values={answered.map((each) => each.timings.decode_speed)} shown={decimal} />
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
      <section aria-label={words.catalogue}>
        <h2>{words.catalogue}</h2>
        <p class="hint">
          <Coded text={words.catalogueNote} />
        </p>
        <Catalogue />
      </section>
    </div>
  );
}

function Model({ model }: { model: MachineModel }) {
  const size = [model.size, model.nbytes === null ? "" : bytes(model.nbytes)].filter(Boolean).join(", ");
  const rows: [string, string][] = [
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
      <div class="card-head">
        <h3>{model.id}</h3>
        <span class={model.state === "ready" ? "status on" : "status"}>{model.state}</span>
      </div>
      <dl class="facts">
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
            <span class="slot-head">
              <strong>{words.slot(at + 1)}</strong> <span>{slot.busy ? words.busy : words.idle}</span>
              <span class="slot-tokens">{slot.own ? words.holds(slot.tokens ?? 0) : slot.busy ? words.others : words.empty}</span>
            </span>
            <Meter label={words.slotUse(at + 1)} value={slot.tokens ?? 0} most={model.n_ctx} />
            {slot.text && <span class="preview">{plainPrompt(slot.text)}</span>}
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
          <button type="button" class="icon small" aria-expanded={open} aria-label={words.follow(plainPrompt(run.text).slice(0, 40))} onClick={() => unfold(!open)}>
            <ChevronRight size={14} class="turns-open" aria-hidden="true" />
          </button>
        )}
        <span class="prefix-text">{plainPrompt(run.text)}</span>
        {run.labels.map((label) => (
          <span class="badge">{label}</span>
        ))}
        <span class="figure">{words.holds(run.tokens)}</span>
        {Object.entries(run.nbytes).map(([tier, size]) => (
          <span class="figure">
            <i class={`dot tier-${tier}`} aria-hidden="true" />
            {tier} {bytes(size)}
          </span>
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
  const share = all ? `${((100 * report.reused_tokens) / all).toFixed(1)}%` : "";
  const misses = Object.entries(report.misses)
    .flatMap(([cause, clients]) => Object.entries(clients).map(([client, tokens]) => ({ cause, client, tokens })))
    .sort((one, other) => other.tokens - one.tokens);
  return (
    <section aria-label={words.report}>
      <h2>{words.report}</h2>
      <p class="hint">{words.reportSince(report.requests, when(report.since))}</p>
      <div class="tiles">
        <Tile name={words.reused} value={share || "–"} note={words.reportReused(report.reused_tokens)} />
        <Tile name={words.computed} value={count(report.computed_tokens)} note={words.tokens} />
        <Tile name={words.weekColumns.saved} value={seconds(report.saved_seconds)} note={words.reportSaved} />
        <Tile name={words.weekColumns.requests} value={count(report.requests)} />
      </div>
      <ul class="meters" aria-label={words.reportBars}>
        {(
          [
            [words.reused, report.reused_tokens, "reused"],
            [words.computed, report.computed_tokens, "computed"],
          ] as const
        ).map(([name, tokens, kind]) => (
          <li>
            <span>{name}</span>
            <Meter label={name} value={tokens} most={all} kind={kind} />
            <span class="num">{words.holds(tokens)}</span>
          </li>
        ))}
      </ul>
      <Week days={report.days} />
      {misses.length ? (
        <>
          <h3>{words.reportMisses}</h3>
          <Table label={words.reportMisses} columns={words.missColumns} figures={["tokens"]}>
            {misses.map((each) => (
              <tr key={`${each.cause} ${each.client}`}>
                <th scope="row">{each.cause}</th>
                <td>{each.client}</td>
                <td class="num">{count(each.tokens)}</td>
              </tr>
            ))}
          </Table>
        </>
      ) : (
        <p class="hint">{words.reportNone}</p>
      )}
    </section>
  );
}

/** The last seven days: how much of each day's prompts was reused, and what was written. */
function Week({ days }: { days: ReportDay[] }) {
  // Days before the first request say nothing.
  const first = days.findIndex((day) => day.requests > 0);
  const most = Math.max(1, ...days.map((day) => day.reused_tokens + day.computed_tokens));
  return (
    <>
      <h3>{words.reportWeek}</h3>
      <Table label={words.reportWeek} columns={words.weekColumns} figures={["requests", "reused", "computed", "saved", "written"]}>
        {days.slice(Math.max(0, first)).map((day) => (
          <tr key={day.day}>
            <th scope="row" class="fit">
              {day.day}
            </th>
            <td class="bar-cell">
              <Meter label={words.reused} value={day.reused_tokens} most={most} kind="reused" />
            </td>
            <td class="num">{count(day.requests)}</td>
            <td class="num">{count(day.reused_tokens)}</td>
            <td class="num">{count(day.computed_tokens)}</td>
            <td class="num">{seconds(day.saved_seconds)}</td>
            <td class="num">{day.written_bytes === null ? "" : bytes(day.written_bytes)}</td>
          </tr>
        ))}
      </Table>
    </>
  );
}

/** What a session is called, where the list has it. */
function named(session: string): string {
  const known = listed.value.sessions.find((each) => each.name === session);
  return known?.title ? titleOf(known) : isOpaque(session) ? session : readable(session);
}

function Requests({ requests }: { requests: RecentRequest[] }) {
  if (!requests.length) return <p class="hint">{words.requestsNone}</p>;
  return (
    <Table label={words.requests} columns={words.columns} figures={["computed", "first", "speed"]} aside={["why"]}>
      {requests.map((each) => (
        <tr key={each.number}>
          <td class="fit">{when(each.ended)}</td>
          <td title={each.session ?? undefined}>
            {each.session && <a href={link({ view: "talk", session: each.session })}>{middle(named(each.session), 30)}</a>}
          </td>
          <td>
            {Object.entries(each.reuse.tiers).map(([tier, tokens]) => (
              <span class="figure">
                <i class={`dot tier-${tier}`} aria-hidden="true" />
                {count(tokens)} {FROM[tier] ?? tier}
              </span>
            ))}
          </td>
          <td class="num">{count(each.reuse.computed)}</td>
          <td class="num">{seconds(each.timings.queued + each.timings.prefill)}</td>
          <td class="num">{decimal(each.timings.decode_speed)}</td>
          <td class="hint only-wide">{each.reuse.why}</td>
        </tr>
      ))}
    </Table>
  );
}
