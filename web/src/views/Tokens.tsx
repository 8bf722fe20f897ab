/** A reply token by token: coloured by surprise, with what could have stood there instead. */

import { useState } from "preact/hooks";
import type { TokenLogprob } from "../stream";
import { texts } from "../texts";
import { Plot } from "./Plot";

interface Given {
  tokens: TokenLogprob[];
  text: string;
  /** The beginning of the text that has no tokens. */
  lead: string;
  /** Go on from the text before a token, with another one in its place. */
  onBranch: (text: string) => void;
}

const STEPS = 6;

/** From 0, what had to come, to the most surprising. */
export function surprise(logprob: number): number {
  return Math.min(STEPS - 1, Math.floor(Math.abs(logprob) / 1.2));
}

/** How surprising a token was, in bits. */
export function bits(logprob: number): number {
  return Math.abs(logprob) / Math.LN2;
}

/** The text up to each token, and how much of it all is no part of the answer: reasoning, and its marks. */
export function offsets(tokens: TokenLogprob[], text: string): { start: number; ends: number[] } {
  const decoder = new TextDecoder();
  let whole = "";
  const ends = tokens.map((token) => (whole += decoder.decode(Uint8Array.from(token.bytes), { stream: true })).length);
  return { start: Math.max(0, whole.lastIndexOf(text)), ends };
}

/** The text before a token with another one in its place, less its first `start` characters. */
function textWith(tokens: TokenLogprob[], at: number, instead: number[], start: number): string | null {
  const bytes = [...tokens.slice(0, at).flatMap((token) => token.bytes), ...instead];
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(Uint8Array.from(bytes)).slice(start);
  } catch {
    // It ends in the middle of a character.
    return null;
  }
}

export function Tokens({ tokens, text, lead, onBranch }: Given) {
  const [chosen, choose] = useState<number | null>(null);
  const { start, ends } = offsets(tokens, text.slice(lead.length));
  const at = chosen === null ? null : tokens[chosen];
  const shown = tokens.filter((_, index) => ends[index]! > start);
  return (
    <div class="tokens" role="group" aria-label={texts.tokens.label} onMouseLeave={() => choose(null)}>
      <p class="token-text">
        {lead}
        {tokens.map((token, index) =>
          ends[index]! <= start ? null : (
            <button
              type="button"
              class={`token surprise-${surprise(token.logprob)}`}
              aria-pressed={chosen === index}
              aria-label={token.token.trim() ? undefined : JSON.stringify(token.token)}
              onMouseEnter={() => choose(index)}
              onFocus={() => choose(index)}
              onClick={() => choose(index)}
            >
              {token.token.replaceAll("\n", "⏎\n")}
            </button>
          ),
        )}
      </p>
      {at && (
        <div class="alternatives" aria-live="polite">
          <p>
            <code>{JSON.stringify(at.token)}</code> {texts.tokens.probability(Math.exp(at.logprob))}
          </p>
          <ul aria-label={texts.tokens.alternatives}>
            {at.top_logprobs
              .filter((other) => other.token !== at.token)
              .map((other) => {
                const changed = textWith(tokens, chosen!, other.bytes, start);
                return (
                  <li>
                    <button
                      type="button"
                      disabled={!changed}
                      title={texts.tokens.branch(other.token)}
                      aria-label={texts.tokens.branch(other.token)}
                      onClick={() => changed && onBranch(lead + changed)}
                    >
                      <code>{JSON.stringify(other.token)}</code> {texts.tokens.probability(Math.exp(other.logprob))}
                    </button>
                  </li>
                );
              })}
          </ul>
        </div>
      )}
      {shown.length > 1 && <Plot name={texts.tokens.along} values={shown.map((token) => bits(token.logprob))} shown={texts.tokens.bits} />}
      <p class="legend" aria-hidden="true">
        {Array.from({ length: STEPS }, (_, step) => (
          <span class={`surprise-${step}`} />
        ))}
        {texts.tokens.legend}
      </p>
    </div>
  );
}
