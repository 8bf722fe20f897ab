/** Who uses what: requests and tokens by key and day, for the owner of a key, or for the operator all of them. */

import { useEffect, useState } from "preact/hooks";
import { get, path, type List, type UsageDay } from "../api";
import { notifyError } from "../notices";
import { Table, Tile } from "../parts/Table";
import { count, texts } from "../texts";
import { Plot } from "./Plot";

const words = texts.usage;

export function Usage() {
  const [rows, show] = useState<UsageDay[] | null>(null);
  useEffect(() => {
    get<List<UsageDay>>(path("usage")).then((page) => show(page.data), notifyError);
  }, []);
  return (
    <div class="page">
      <header class="row">
        <h1>{words.title}</h1>
      </header>
      <p class="hint">{words.note}</p>
      {rows && !rows.length && <p class="hint">{words.none}</p>}
      {rows && rows.length > 0 && (
        <>
          <Sums rows={rows} />
          <Table label={words.title} columns={words.columns} figures={["requests", "prompt", "cached", "written", "left"]}>
            {rows.map((row) => (
              <tr key={`${row.day} ${row.key}`}>
                <td class="fit">{row.day}</td>
                <th scope="row" title={row.key}>
                  {row.namespace}
                </th>
                <td class="num">{count(row.requests)}</td>
                <td class="num">{count(row.prompt_tokens)}</td>
                <td class="num">{words.share(row.cached_tokens, row.prompt_tokens)}</td>
                <td class="num">{count(row.completion_tokens)}</td>
                <td class="num">
                  {row.tokens_per_day === null
                    ? words.unlimited
                    : count(Math.max(0, row.tokens_per_day - row.prompt_tokens - row.completion_tokens))}
                </td>
              </tr>
            ))}
          </Table>
        </>
      )}
    </div>
  );
}

/** The last day in large figures, and the tokens of each day as bars. */
function Sums({ rows }: { rows: UsageDay[] }) {
  const latest = rows[0]!.day;
  const today = rows.filter((row) => row.day === latest);
  const sum = (some: UsageDay[], name: "requests" | "prompt_tokens" | "cached_tokens" | "completion_tokens") =>
    some.reduce((total, row) => total + row[name], 0);
  const days = [...new Set(rows.map((row) => row.day))].sort();
  const tokens = days.map((day) => {
    const some = rows.filter((row) => row.day === day);
    return sum(some, "prompt_tokens") + sum(some, "completion_tokens");
  });
  return (
    <>
      <div class="tiles">
        <Tile name={words.columns.requests} value={count(sum(today, "requests"))} note={latest} />
        <Tile name={words.columns.prompt} value={count(sum(today, "prompt_tokens"))} note={latest} />
        <Tile
          name={words.columns.cached}
          value={words.share(sum(today, "cached_tokens"), sum(today, "prompt_tokens")) || "–"}
          note={count(sum(today, "cached_tokens"))}
        />
        <Tile name={words.columns.written} value={count(sum(today, "completion_tokens"))} note={latest} />
      </div>
      {days.length > 1 && <Plot name={words.byDay} values={tokens} shown={count} />}
    </>
  );
}
