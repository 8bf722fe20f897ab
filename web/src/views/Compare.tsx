/** Two branches side by side, from where they part. */

import { ArrowLeft } from "lucide-preact";
import { useEffect, useState } from "preact/hooks";
import { get, path, query, type List, type SessionAnswer, type Turn } from "../api";
import { sameTurn } from "../conversation";
import { difference, type Piece } from "../difference";
import { titleOf } from "../names";
import { notifyError } from "../notices";
import { link } from "../route";
import { texts } from "../texts";

const PAGE = 1000;
const MOST = 10_000;

async function allTurns(session: string): Promise<Turn[]> {
  const found: Turn[] = [];
  for (let more = true; more && found.length < MOST; ) {
    const page = await get<List<Turn>>(path("sessions", session, "turns") + query({ limit: PAGE, after: found.length }));
    found.push(...page.data);
    more = page.has_more;
  }
  return found;
}

export function Compare({ session, other }: { session: string; other: string }) {
  const [turns, show] = useState<[Turn[], Turn[]] | null>(null);
  const [titles, name] = useState<Record<string, string>>({});
  useEffect(() => {
    let wanted = true;
    Promise.all([allTurns(session), allTurns(other)]).then((found) => wanted && show(found), notifyError);
    for (const each of [session, other])
      get<SessionAnswer>(path("sessions", each)).then(({ title }) => wanted && name((before) => ({ ...before, [each]: title })), () => {});
    return () => {
      wanted = false;
    };
  }, [session, other]);
  const titled = (each: string) => titleOf({ name: each, title: titles[each] ?? "", agent: "" });
  const common = turns ? turns[0].findIndex((turn, at) => !turns[1][at] || !sameTurn(turn, turns[1][at])) : 0;
  const shared = turns ? (common < 0 ? turns[0].length : common) : 0;
  const rows = turns ? Math.max(turns[0].length, turns[1].length) - shared : 0;
  return (
    <div class="page compare">
      <header class="row">
        <h1>{texts.compare.title}</h1>
        <a class="plain-button" href={link({ view: "talk", session })}>
          <ArrowLeft size={16} aria-hidden="true" /> {texts.compare.back}
        </a>
      </header>
      {turns && (
        <>
          <p class="note">{texts.compare.common(shared)}</p>
          <div class="sides">
            <h2>
              <a href={link({ view: "talk", session })} title={session}>
                {titled(session)}
              </a>
            </h2>
            <h2>
              <a href={link({ view: "talk", session: other })} title={other}>
                {titled(other)}
              </a>
            </h2>
            {rows === 0 && <p class="hint">{texts.compare.nothing}</p>}
            {Array.from({ length: rows }, (_, at) => (
              <Pair sessions={[session, other]} titled={titled} one={turns[0][shared + at]} other={turns[1][shared + at]} />
            ))}
          </div>
        </>
      )}
    </div>
  );
}

function text(turn: Turn | undefined): string {
  return turn?.reply?.content ?? "";
}

interface PairGiven {
  sessions: [string, string];
  titled: (session: string) => string;
  one: Turn | undefined;
  other: Turn | undefined;
}

function Pair({ sessions, titled, one, other }: PairGiven) {
  const [left, right] = difference(text(one), text(other));
  return (
    <>
      <Side session={sessions[0]} title={titled(sessions[0])} turn={one} pieces={left} />
      <Side session={sessions[1]} title={titled(sessions[1])} turn={other} pieces={right} />
    </>
  );
}

function Side({ session, title, turn, pieces }: { session: string; title: string; turn: Turn | undefined; pieces: Piece[] }) {
  // On a phone sides are below each other, so that each has its name.
  const name = (
    <a class="side-name only-phone" href={link({ view: "talk", session })}>
      {title}
    </a>
  );
  if (!turn)
    return (
      <div class="side-text">
        {name}
        <p class="hint">{texts.compare.ends}</p>
      </div>
    );
  return (
    <article class="side-text" aria-label={texts.talk.turnLabel(turn.turn)}>
      {name}
      <p class="asked">{turn.messages.map((message) => message.content).join("\n")}</p>
      <p class="plain">{pieces.map((piece) => (piece.changed ? <mark>{piece.text}</mark> : piece.text))}</p>
    </article>
  );
}
