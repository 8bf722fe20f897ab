/** Buttons that are an icon, with their names for those who do not see it. */

import type { LucideIcon } from "lucide-preact";
import type { ComponentChildren } from "preact";

interface Given {
  icon: LucideIcon;
  label: string;
  onClick?: (event: MouseEvent) => void;
  disabled?: boolean;
  pressed?: boolean;
  expanded?: boolean;
  controls?: string;
  class?: string;
  submit?: boolean;
  children?: ComponentChildren;
}

export function IconButton({ icon: Icon, label, onClick, disabled, pressed, expanded, controls, submit, children, ...given }: Given) {
  return (
    <button
      type={submit ? "submit" : "button"}
      class={`icon ${given.class ?? ""}`}
      aria-label={label}
      title={label}
      disabled={disabled}
      aria-pressed={pressed}
      aria-expanded={expanded}
      aria-controls={expanded ? controls : undefined}
      onClick={onClick}
    >
      <Icon size={18} strokeWidth={1.75} aria-hidden="true" />
      {children}
    </button>
  );
}

/** The mark of perdure: a conversation that goes on, and a branch of it. */
export function Mark({ size = 28 }: { size?: number }) {
  return (
    <svg class="mark" width={size} height={size} viewBox="0 0 32 32" aria-hidden="true">
      <rect width="32" height="32" rx="9" class="mark-ground" />
      <path d="M11 7v18M11 18.5c0-6 10-2.5 10-9" class="mark-line" />
      <circle cx="11" cy="7" r="2.7" class="mark-dot" />
      <circle cx="11" cy="25" r="2.7" class="mark-dot" />
      <circle cx="21" cy="8.5" r="2.7" class="mark-dot" />
    </svg>
  );
}
