/** A small plot of values one after another. */

import { texts } from "../texts";

const WIDTH = 240;
const HEIGHT = 56;

interface Given {
  name: string;
  values: number[];
  shown: (value: number) => string;
}

export function Plot({ name, values, shown }: Given) {
  const most = Math.max(0, ...values);
  const across = (at: number) => (values.length > 1 ? (at / (values.length - 1)) * WIDTH : WIDTH / 2);
  const down = (value: number) => HEIGHT - 3 - (most ? (value / most) * (HEIGHT - 8) : 0);
  const points = values.map((value, at) => `${across(at).toFixed(1)},${down(value).toFixed(1)}`).join(" ");
  const last = values[values.length - 1];
  const label = texts.machine.plotOf(name, shown(last ?? 0), shown(most));
  return (
    <figure class="plot">
      <figcaption>
        {name} <strong>{last === undefined ? "–" : shown(last)}</strong>
        <span class="hint">{values.length > 1 ? texts.machine.plotMost(shown(most)) : texts.machine.plotNone}</span>
      </figcaption>
      <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label={label}>
        {values.length > 1 && <polygon points={`0,${HEIGHT} ${points} ${WIDTH},${HEIGHT}`} />}
        <polyline points={points} />
        {values.length === 1 && <circle cx={across(0)} cy={down(values[0]!)} r="3" />}
      </svg>
    </figure>
  );
}
