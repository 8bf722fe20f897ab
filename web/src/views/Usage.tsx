/** Who uses what: requests and tokens by key and day, for the owner of a key, or for the operator all of them. */

import { useEffect, useState } from "preact/hooks";
import { get, path, type List, type UsageDay } from "../api";
import { notifyError } from "../notices";
import { count, texts } from "../texts";

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
        <div class="wide" tabIndex={0} role="region" aria-label={words.title}>
          <table class="list">
            <thead>
              <tr>
                {Object.values(words.columns).map((column) => (
                  <th scope="col">{column}</th>
                ))}
              </tr>
            </thead>
            <tbody>
              {rows.map((row) => (
                <tr key={`${row.day} ${row.key}`}>
                  <td class="fit">{row.day}</td>
                  <th scope="row" title={row.key}>
                    {row.namespace}
                  </th>
                  <td class="fit">{count(row.requests)}</td>
                  <td class="fit">{count(row.prompt_tokens)}</td>
                  <td class="fit">{words.share(row.cached_tokens, row.prompt_tokens)}</td>
                  <td class="fit">{count(row.completion_tokens)}</td>
                  <td class="fit">
                    {row.tokens_per_day === null
                      ? words.unlimited
                      : count(Math.max(0, row.tokens_per_day - row.prompt_tokens - row.completion_tokens))}
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </div>
  );
}
