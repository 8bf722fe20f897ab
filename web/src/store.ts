/** Values that views watch. */

import { useEffect, useReducer } from "preact/hooks";

export class Watched {
  private readonly watchers = new Set<() => void>();
  private scheduled = false;

  watch(watcher: () => void): () => void {
    this.watchers.add(watcher);
    return () => this.watchers.delete(watcher);
  }

  /** Tell everybody who watches, at most once a frame. */
  changed(): void {
    if (this.scheduled) return;
    this.scheduled = true;
    const tell = () => {
      if (!this.scheduled) return;
      this.scheduled = false;
      for (const watcher of this.watchers) watcher();
    };
    requestAnimationFrame(tell);
    // A tab in the background gets no frames.
    if (document.hidden) setTimeout(tell, 100);
  }
}

/** Draw the calling component again whenever `watched` changes. */
export function useWatched<T extends Watched>(watched: T): T {
  const [, again] = useReducer((drawn: number, _: void) => drawn + 1, 0);
  useEffect(() => watched.watch(() => again()), [watched]);
  return watched;
}

export class Value<T> extends Watched {
  constructor(private current: T) {
    super();
  }

  get value(): T {
    return this.current;
  }

  set value(next: T) {
    this.current = next;
    this.changed();
  }
}
