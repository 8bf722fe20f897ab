/** Under a reply: where its prompt came from, how fast it was, and why not more was reused. */

import { ChevronDown, Microscope } from "lucide-preact";
import { useId, useState } from "preact/hooks";
import type { Turn } from "../api";
import type { Told } from "../conversation";
import { texts } from "../texts";

const TIERS = ["slot", "memory", "disk", "shared"] as const;

interface Figures {
  tiers: Record<string, number>;
  /** How long it took to have tokens from a tier, where that is known. */
  seconds: Record<string, number>;
  computed: number;
  first: number;
  speed: number;
  written: number;
  why: string;
  /** What was guessed ahead, in words; empty where nothing was, or nothing is known of it any more. */
  guesses: string[];
}

/** From what the reply said of itself, or later from what its turn has kept of that. */
export function figures(turn: Turn, told: Told | undefined): Figures {
  const usage = turn.usage;
  const written = usage.completion_tokens ?? 0;
  if (told) {
    const { reuse, timings } = told;
    return {
      tiers: reuse.tiers,
      seconds: { ...reuse.seconds, computed: timings.prefill },
      computed: reuse.computed,
      first: timings.queued + timings.prefill,
      speed: timings.decode_speed,
      written,
      why: reuse.why,
      guesses: [
        ...(timings.drafted_tokens ? [texts.reuse.guessed(timings.drafted_tokens, timings.accepted_tokens ?? 0)] : []),
        ...(timings.forced_tokens ? [texts.reuse.forced(timings.forced_tokens)] : []),
      ],
    };
  }
  const tiers = Object.fromEntries(TIERS.map((tier) => [tier, usage[`${tier}_tokens`] ?? 0]));
  const known = [...TIERS, "computed"].filter((tier) => usage[`${tier}_us`] !== undefined);
  const decode = (usage.decode_ms ?? 0) / 1000;
  return {
    tiers,
    seconds: Object.fromEntries(known.map((tier) => [tier, usage[`${tier}_us`]! / 1e6])),
    computed: Math.max(0, (usage.prompt_tokens ?? 0) - (usage.cached_tokens ?? 0)),
    first: (usage.first_token_ms ?? 0) / 1000,
    speed: decode > 0 && written > 1 ? (written - 1) / decode : 0,
    written,
    why: turn.why,
    guesses: [],
  };
}

interface Given {
  turn: Turn;
  told: Told | undefined;
  onInside: () => void;
}

/** One quiet line under a reply. It opens to the bar, the times and the reason. */
export function ReuseLine({ turn, told, onInside }: Given) {
  const [open, show] = useState(false);
  const id = useId();
  const { tiers, seconds, computed, first, speed, written, why, guesses } = figures(turn, told);
  const parts = [...TIERS.map((tier) => [tier, tiers[tier] ?? 0] as const), ["computed", computed] as const].filter(
    ([, tokens]) => tokens > 0,
  );
  if (!parts.length) return null;
  const whole = parts.reduce((sum, [, tokens]) => sum + tokens, 0);
  const words = [
    ...parts.map(([name, tokens]) => texts.reuse.part(tokens, texts.reuse[name], seconds[name])),
    ...(first ? [texts.reuse.first(first)] : []),
    ...(speed ? [texts.reuse.speed(speed)] : []),
    texts.reuse.written(written),
    ...guesses,
  ];
  return (
    <div class="reuse">
      <button type="button" class="reuse-line" aria-expanded={open} aria-controls={open ? id : undefined} onClick={() => show(!open)}>
        {texts.reuse.line(whole - computed, whole)}
        {speed ? <span class="reuse-speed">{texts.reuse.speed(speed)}</span> : null}
        <ChevronDown size={14} class={open ? "turned" : undefined} aria-hidden="true" />
      </button>
      {open && (
        <div id={id} class="reuse-more">
          <div class="reuse-bar" role="img" aria-label={`${texts.reuse.label}: ${words.join(", ")}`}>
            {parts.map(([name, tokens]) => (
              <span class={`tier-${name}`} style={{ flexGrow: tokens }} />
            ))}
          </div>
          <p class="figures">
            {parts.map(([name, tokens]) => (
              <span class="figure">
                <i class={`dot tier-${name}`} aria-hidden="true" />
                {texts.reuse.part(tokens, texts.reuse[name], seconds[name])}
              </span>
            ))}
            {words.slice(parts.length).map((word) => (
              <span class="figure">{word}</span>
            ))}
          </p>
          {why && <p class="why">{texts.reuse.why(why)}</p>}
          {turn.kind === "turn" && (
            <button type="button" class="plain-button" onClick={onInside}>
              <Microscope size={15} aria-hidden="true" /> {texts.talk.inside}
            </button>
          )}
        </div>
      )}
    </div>
  );
}
