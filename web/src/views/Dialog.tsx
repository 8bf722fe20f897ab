/** A dialog over the page. Escape, or a click beside it, closes it. */

import type { ComponentChildren } from "preact";
import { X } from "lucide-preact";
import { useEffect, useRef } from "preact/hooks";
import { IconButton } from "../parts/Icon";
import { texts } from "../texts";

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
      class={wide ? "large" : undefined}
      aria-label={title}
      onClose={onClose}
      onClick={(event) => {
        if (event.target === element.current) element.current?.close();
      }}
    >
      <div class="dialog">
        <header class="dialog-head">
          <h2>{title}</h2>
          <IconButton icon={X} label={texts.dialog.close} onClick={() => element.current?.close()} />
        </header>
        {children}
      </div>
    </dialog>
  );
}
