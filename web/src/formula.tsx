/** Mathematics, as MathML that the browser draws. */

import { useEffect, useRef } from "preact/hooks";

const LONGEST = 5000;

export function Formula({ text, display }: { text: string; display: boolean }) {
  const element = useRef<HTMLSpanElement>(null);
  useEffect(() => {
    const here = element.current;
    if (!here || text.length > LONGEST) return;
    let wanted = true;
    void import("temml").then(({ default: temml }) => {
      if (!wanted) return;
      // Commands that would load or link something are refused, and what expands without end is cut.
      const options = { displayMode: display, throwOnError: true, trust: false, strict: false, maxExpand: 500 };
      const drawn = document.createElement("span");
      try {
        temml.render(text, drawn, options);
        here.replaceChildren(...drawn.childNodes);
      } catch {
        here.textContent = text;
      }
    });
    return () => {
      wanted = false;
    };
  }, [text, display]);
  // A wide one scrolls, and by keyboard too.
  return <span ref={element} class={display ? "formula display" : "formula"} {...(display ? { tabIndex: 0 } : {})} />;
}
