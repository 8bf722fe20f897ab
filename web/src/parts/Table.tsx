/** A table that scrolls by itself where it is too wide. Columns of figures are aligned at the right. */

import type { ComponentChildren } from "preact";

interface Given {
  label: string;
  /** Names of the columns by their keys. */
  columns: Record<string, string>;
  /** Keys of the columns that have figures. */
  figures?: string[];
  /** Whether its rows become cards on a small screen. */
  cards?: boolean;
  /** Keys of the columns that a small screen has no room for. */
  aside?: string[];
  children: ComponentChildren;
}

export function Table({ label, columns, figures = [], cards = false, aside = [], children }: Given) {
  return (
    <div class={cards ? "wide as-cards" : "wide"} tabIndex={0} role="region" aria-label={label}>
      <table class="list">
        <thead>
          <tr>
            {Object.entries(columns).map(([key, name]) => (
              <th scope="col" class={figures.includes(key) ? "num" : aside.includes(key) ? "only-wide" : undefined}>
                {name}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>{children}</tbody>
      </table>
    </div>
  );
}

interface MeterGiven {
  label: string;
  value: number;
  most: number;
  kind?: string;
}

/** A bar of how much of something there is. */
export function Meter({ label, value, most, kind = "" }: MeterGiven) {
  const share = most > 0 ? Math.min(1, value / most) : 0;
  return (
    <span class={`bar ${kind}`} role="meter" aria-label={label} aria-valuemin={0} aria-valuemax={Math.max(1, most)} aria-valuenow={Math.min(value, Math.max(1, most))}>
      <span style={{ width: `${(100 * share).toFixed(2)}%` }} />
    </span>
  );
}

/** A figure that is read from across the room, with its name. */
export function Tile({ name, value, note }: { name: string; value: string; note?: string | undefined }) {
  return (
    <div class="tile">
      <span class="tile-name">{name}</span>
      <strong class="tile-value">{value}</strong>
      {note && <span class="hint">{note}</span>}
    </div>
  );
}
