/** Where in the page one is: a part of its address, so that Back works and a link can be kept. */

import { Value } from "./store";

export type Route =
  | { view: "talk"; session: string | null }
  | { view: "compare"; session: string; other: string }
  | { view: "sessions" }
  | { view: "machine" }
  | { view: "usage" };

export function parse(hash: string): Route {
  const parts = hash.replace(/^#\/?/, "").split("/").map(decoded);
  if (parts[0] === "c" && parts[1]) return { view: "talk", session: parts[1] };
  if (parts[0] === "compare" && parts[1] && parts[2]) return { view: "compare", session: parts[1], other: parts[2] };
  if (parts[0] === "sessions" || parts[0] === "machine" || parts[0] === "usage") return { view: parts[0] };
  return { view: "talk", session: null };
}

function decoded(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export function link(route: Route): string {
  const parts =
    route.view === "talk"
      ? route.session === null
        ? []
        : ["c", route.session]
      : route.view === "compare"
        ? ["compare", route.session, route.other]
        : [route.view];
  return "#/" + parts.map(encodeURIComponent).join("/");
}

export const route = new Value<Route>(parse(location.hash));

/** Go somewhere. With `replace`, the place before is not in the history. */
export function open(next: Route, replace = false): void {
  history[replace ? "replaceState" : "pushState"](null, "", link(next));
  route.value = next;
}

addEventListener("popstate", () => {
  route.value = parse(location.hash);
});
addEventListener("hashchange", () => {
  route.value = parse(location.hash);
});
