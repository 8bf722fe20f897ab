/** Where a message is written, with text files that go along. */

import { useEffect, useRef, useState } from "preact/hooks";
import { notify } from "../notices";
import { bytes, texts } from "../texts";

interface Given {
  writing: boolean;
  stopping: boolean;
  draft: string;
  onDraft: (text: string) => void;
  onSend: (text: string) => void;
  onStop: () => void;
}

interface Attached {
  name: string;
  text: string;
}

const LARGEST = 1 << 20;

/** A message with its files, each in a fence that nothing in it can close. */
export function withFiles(text: string, files: Attached[]): string {
  const parts = files.map(({ name, text }) => {
    const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, text].filter(Boolean).join("\n\n");
}

export function Composer({ writing, stopping, draft, onDraft, onSend, onStop }: Given) {
  const [files, attach] = useState<Attached[]>([]);
  const box = useRef<HTMLTextAreaElement>(null);
  const chooser = useRef<HTMLInputElement>(null);
  useEffect(() => box.current?.focus(), []);
  useEffect(() => {
    const element = box.current;
    if (!element) return;
    element.style.height = "auto";
    element.style.height = `${Math.min(element.scrollHeight, 320)}px`;
  }, [draft]);
  const send = () => {
    if (writing || !(draft.trim() || files.length)) return;
    onSend(withFiles(draft, files));
    onDraft("");
    attach([]);
  };
  const take = async (list: File[]) => {
    for (const file of list) {
      if (file.size > LARGEST) {
        notify(texts.composer.tooLarge(file.name, bytes(LARGEST)), "error");
        continue;
      }
      try {
        const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
        if (text.includes("\0")) throw new TypeError();
        attach((before) => [...before, { name: file.name, text }]);
      } catch {
        notify(texts.composer.notText(file.name), "error");
      }
    }
    box.current?.focus();
  };
  return (
    <form
      class="composer"
      onSubmit={(event) => {
        event.preventDefault();
        send();
      }}
      onDragOver={(event) => event.preventDefault()}
      onDrop={(event) => {
        event.preventDefault();
        void take([...(event.dataTransfer?.files ?? [])]);
      }}
    >
      {files.length > 0 && (
        <ul class="files">
          {files.map((file, at) => (
            <li>
              {file.name}
              <button
                type="button"
                class="quiet"
                aria-label={texts.composer.detach(file.name)}
                onClick={() => attach(files.filter((_, other) => other !== at))}
              >
                ✕
              </button>
            </li>
          ))}
        </ul>
      )}
      <div class="row">
        <textarea
          ref={box}
          id="message"
          rows={1}
          aria-label={texts.composer.label}
          aria-describedby="composer-keys"
          placeholder={texts.composer.placeholder}
          value={draft}
          onInput={(event) => onDraft(event.currentTarget.value)}
          onKeyDown={(event) => {
            if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
              event.preventDefault();
              send();
            } else if (event.key === "Escape" && writing) onStop();
          }}
        />
        <input
          ref={chooser}
          type="file"
          multiple
          hidden
          aria-label={texts.composer.attach}
          onChange={(event) => {
            void take([...(event.currentTarget.files ?? [])]);
            event.currentTarget.value = "";
          }}
        />
        <button type="button" class="quiet" title={texts.composer.attach} aria-label={texts.composer.attach} onClick={() => chooser.current?.click()}>
          +
        </button>
        {writing ? (
          <button type="button" class="stop" disabled={stopping} onClick={onStop}>
            {stopping ? texts.composer.stopping : texts.composer.stop}
          </button>
        ) : (
          <button type="submit" disabled={!(draft.trim() || files.length)}>
            {texts.composer.send}
          </button>
        )}
      </div>
      <p id="composer-keys" class="hint">
        {texts.composer.keys}
      </p>
    </form>
  );
}
