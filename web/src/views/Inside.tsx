/** Inside of a reply: the page that the server makes of it, in a frame that can reach nothing. */

import { useEffect, useRef, useState } from "preact/hooks";
import { readAnalysis, type Analysis, type Progress } from "../analysis";
import { texts } from "../texts";
import { Dialog } from "./Dialog";

/** A document of the server's that shows what it is sent, under a policy of its own. */
const FRAME = "/page/analysis";

interface Given {
  session: string;
  turn: number;
  onClose: () => void;
}

export function Inside({ session, turn, onClose }: Given) {
  const [progress, tell] = useState<Progress | null>(null);
  const [analysis, show] = useState<Analysis | null>(null);
  const [error, fail] = useState<string | null>(null);
  const [tries, again] = useState(0);
  useEffect(() => {
    const leaving = new AbortController();
    tell(null);
    fail(null);
    readAnalysis(session, turn, tell, leaving.signal).then(show, (error) => {
      if (!leaving.signal.aborted) fail(error instanceof Error ? error.message : String(error));
    });
    return () => leaving.abort();
  }, [session, turn, tries]);
  return (
    <Dialog title={texts.inside.title(turn)} onClose={onClose} wide>
      {analysis ? (
        <Frame html={analysis.html} title={texts.inside.frame(turn)} />
      ) : error !== null ? (
        <div class="problem" role="alert">
          <p>{error}</p>
          <button type="button" onClick={() => again(tries + 1)}>
            {texts.inside.again}
          </button>
        </div>
      ) : (
        <div class="inside-progress">
          <label>
            <span role="status">{texts.inside.stages[progress?.stage ?? ""] ?? texts.inside.starting}</span>
            {progress?.total ? (
              <progress max={progress.total} value={progress.done} />
            ) : (
              <progress />
            )}
          </label>
          <p class="hint">{texts.inside.note}</p>
        </div>
      )}
      <form method="dialog" class="row">
        <button type="submit">{analysis || error !== null ? texts.inside.close : texts.inside.cancel}</button>
      </form>
    </Dialog>
  );
}

/** It has no origin and no network, and is sent its text once it listens: nothing else passes between the two. */
function Frame({ html, title }: { html: string; title: string }) {
  const frame = useRef<HTMLIFrameElement>(null);
  useEffect(() => {
    const heard = (event: MessageEvent) => {
      const target = frame.current?.contentWindow;
      if (!target || event.source !== target || event.data !== "ready") return;
      removeEventListener("message", heard);
      // A sandbox has no origin that could be named.
      target.postMessage(html, "*");
    };
    addEventListener("message", heard);
    frame.current!.src = FRAME;
    return () => removeEventListener("message", heard);
  }, [html]);
  return <iframe ref={frame} class="inside" title={title} sandbox="allow-scripts" referrerpolicy="no-referrer" />;
}
