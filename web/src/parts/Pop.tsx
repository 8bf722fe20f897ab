/** What opens over the page beside a button: menus and choices. Escape, or a click elsewhere, closes it. */

import { Check, ChevronDown, type LucideIcon } from "lucide-preact";
import type { ComponentChildren } from "preact";
import { useEffect, useId, useRef, useState } from "preact/hooks";

const EDGE = 8;
/** Pixels that stay free at the edges of the window. */

/** Put an open popover under its button, or over it where there is more room. */
export function place(pop: HTMLElement, button: Element): void {
  const at = button.getBoundingClientRect();
  pop.style.minWidth = `${Math.round(at.width)}px`;
  const { width, height } = pop.getBoundingClientRect();
  const below = innerHeight - at.bottom - EDGE;
  const top = height <= below || below >= at.top ? at.bottom + 4 : Math.max(EDGE, at.top - height - 4);
  const left = Math.max(EDGE, Math.min(at.left, innerWidth - width - EDGE));
  pop.style.top = `${Math.round(top)}px`;
  pop.style.left = `${Math.round(left)}px`;
  pop.style.maxHeight = `${Math.round(Math.max(160, (top > at.top ? innerHeight - top : at.top) - EDGE))}px`;
}

/** Move among the items of a menu or a list with the keys that everybody knows. */
export function roam(event: KeyboardEvent, root: HTMLElement, items: string): void {
  const all = [...root.querySelectorAll<HTMLElement>(items)].filter((item) => !item.hasAttribute("disabled"));
  const at = all.indexOf(document.activeElement as HTMLElement);
  const to: Record<string, number> = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 };
  let next = to[event.key];
  if (next === undefined && event.key.length === 1 && /\S/.test(event.key)) {
    const letter = event.key.toLowerCase();
    const found = [...all.slice(at + 1), ...all.slice(0, at + 1)].find((item) => item.textContent!.trim().toLowerCase().startsWith(letter));
    next = found ? all.indexOf(found) : undefined;
  }
  if (next === undefined || !all.length) return;
  event.preventDefault();
  event.stopPropagation();
  all[(next + all.length) % all.length]!.focus();
}

interface MenuGiven {
  label: string;
  icon?: LucideIcon;
  /** What the button shows; its name is the label. */
  face?: ComponentChildren;
  class?: string;
  children: (close: () => void) => ComponentChildren;
  /** Called when it opens. */
  onOpen?: () => void;
}

export function Menu({ label, icon: Icon, face, children, onOpen, ...given }: MenuGiven) {
  const [open, show] = useState(false);
  const button = useRef<HTMLButtonElement>(null);
  const pop = useRef<HTMLDivElement>(null);
  /** Whether a press of the button closes the popover, as a press beside it does. */
  const closes = useRef(false);
  const id = useId();
  useEffect(() => {
    const element = pop.current;
    if (!open || !element) return;
    element.showPopover();
    place(element, button.current!);
    (element.querySelector<HTMLElement>("[aria-checked=true]") ?? element.querySelector<HTMLElement>("button"))?.focus();
    const closed = (event: Event) => {
      if ((event as ToggleEvent).newState !== "closed") return;
      if (element.contains(document.activeElement) || document.activeElement === document.body) button.current?.focus();
      show(false);
    };
    element.addEventListener("toggle", closed);
    return () => element.removeEventListener("toggle", closed);
  }, [open]);
  const close = () => pop.current?.hidePopover();
  return (
    <>
      <button
        ref={button}
        type="button"
        class={given.class ?? "icon"}
        aria-label={label}
        title={label}
        aria-haspopup="menu"
        aria-expanded={open}
        aria-controls={open ? id : undefined}
        onPointerDown={() => (closes.current = open)}
        onClick={() => {
          if (closes.current) return (closes.current = false);
          onOpen?.();
          show(true);
        }}
      >
        {Icon && <Icon size={18} strokeWidth={1.75} aria-hidden="true" />}
        {face}
      </button>
      {open && (
        <div ref={pop} id={id} class="pop" popover="auto" role="menu" aria-label={label} onKeyDown={(event) => roam(event, event.currentTarget, "[role^=menuitem]")}>
          {children(close)}
        </div>
      )}
    </>
  );
}

interface ItemGiven {
  icon?: LucideIcon;
  onPick: () => void;
  checked?: boolean;
  danger?: boolean;
  disabled?: boolean;
  children: ComponentChildren;
}

export function MenuItem({ icon: Icon, onPick, checked, danger, disabled, children }: ItemGiven) {
  return (
    <button
      type="button"
      role={checked === undefined ? "menuitem" : "menuitemradio"}
      aria-checked={checked}
      class={danger ? "item danger" : "item"}
      disabled={disabled}
      tabIndex={-1}
      onClick={onPick}
    >
      {Icon && <Icon size={16} strokeWidth={1.75} aria-hidden="true" />}
      <span class="item-text">{children}</span>
      {checked && <Check size={16} strokeWidth={2} aria-hidden="true" />}
    </button>
  );
}

interface SelectGiven {
  label: string;
  options: Record<string, string>;
  value: string;
  onChange: (value: string) => void;
  hint?: string;
}

/** A choice of one of several, in place of the browser's. */
export function Select({ label, options, value, onChange, hint }: SelectGiven) {
  const [open, show] = useState(false);
  const button = useRef<HTMLButtonElement>(null);
  const list = useRef<HTMLDivElement>(null);
  /** Whether a press of the button closes the popover, as a press beside it does. */
  const closes = useRef(false);
  const id = useId();
  useEffect(() => {
    const element = list.current;
    if (!open || !element) return;
    element.showPopover();
    place(element, button.current!);
    element.querySelector<HTMLElement>("[aria-selected=true]")?.focus();
    const closed = (event: Event) => {
      if ((event as ToggleEvent).newState !== "closed") return;
      button.current?.focus();
      show(false);
    };
    element.addEventListener("toggle", closed);
    return () => element.removeEventListener("toggle", closed);
  }, [open]);
  const pick = (name: string) => {
    onChange(name);
    list.current?.hidePopover();
  };
  return (
    <div class="field">
      <span id={`${id}-label`} class="field-label">
        {label}
      </span>
      <button
        ref={button}
        type="button"
        role="combobox"
        class="select"
        aria-labelledby={`${id}-label`}
        aria-describedby={hint ? `${id}-hint` : undefined}
        aria-haspopup="listbox"
        aria-expanded={open}
        aria-controls={id}
        onPointerDown={() => (closes.current = open)}
        onClick={() => {
          if (closes.current) return (closes.current = false);
          show(true);
        }}
        onKeyDown={(event) => {
          if (event.key === "ArrowDown" || event.key === "ArrowUp") {
            event.preventDefault();
            show(true);
          }
        }}
      >
        <span>{options[value] ?? value}</span>
        <ChevronDown size={16} aria-hidden="true" />
      </button>
      <div
        ref={list}
        id={id}
        class="pop"
        popover="auto"
        role="listbox"
        aria-labelledby={`${id}-label`}
        onKeyDown={(event) => {
          if (event.key === "Enter" || event.key === " ") {
            const name = (document.activeElement as HTMLElement).dataset.value;
            event.preventDefault();
            if (name !== undefined) pick(name);
          } else roam(event, event.currentTarget, "[role=option]");
        }}
      >
        {Object.entries(options).map(([name, text]) => (
          <div role="option" class="item" tabIndex={-1} aria-selected={name === value} data-value={name} onClick={() => pick(name)}>
            <span class="item-text">{text}</span>
            {name === value && <Check size={16} strokeWidth={2} aria-hidden="true" />}
          </div>
        ))}
      </div>
      {hint && (
        <span id={`${id}-hint`} class="hint">
          {hint}
        </span>
      )}
    </div>
  );
}

/** A file box: a button of ours over the browser's input. */
export function FileButton({ label, icon: Icon, onFiles, accept }: { label: string; icon: LucideIcon; onFiles: (files: File[]) => void; accept?: string }) {
  const input = useRef<HTMLInputElement>(null);
  return (
    <>
      <input
        ref={input}
        type="file"
        hidden
        aria-label={label}
        accept={accept}
        onChange={(event) => {
          onFiles([...(event.currentTarget.files ?? [])]);
          event.currentTarget.value = "";
        }}
      />
      <button type="button" class="plain-button" onClick={() => input.current?.click()}>
        <Icon size={16} aria-hidden="true" /> {label}
      </button>
    </>
  );
}
