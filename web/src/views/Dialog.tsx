/** A dialog over the page. Escape, or a click beside it, closes it. */

import type { ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";

interface Given {
  title: string;
  onClose: () => void;
  /** Whether it takes all the room that there is. */
  wide?: boolean;
  children: ComponentChildren;
}

export function Dialog({ title, onClose, wide = false, children }: Given) {
  const element = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    element.current?.showModal();
  }, []);
  return (
    <dialog
      ref={element}
      class={wide ? "wide" : undefined}
      aria-label={title}
      onClose={onClose}
      onClick={(event) => {
        if (event.target === element.current) element.current?.close();
      }}
    >
      <div class="dialog">
        <h2>{title}</h2>
        {children}
      </div>
    </dialog>
  );
}
