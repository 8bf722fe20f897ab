/** Light, dark, or as the system has it. */

import { Value } from "./store";

export const THEMES = ["auto", "light", "dark"] as const;
type Theme = (typeof THEMES)[number];
const NAME = "perdure-theme";

function stored(): Theme {
  const found = localStorage.getItem(NAME);
  return THEMES.find((name) => name === found) ?? "auto";
}

export const theme = new Value<Theme>(stored());

function apply(): void {
  localStorage.setItem(NAME, theme.value);
  document.documentElement.dataset.theme = theme.value;
}

theme.watch(apply);
document.documentElement.dataset.theme = theme.value;
