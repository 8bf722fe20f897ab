/** Where a message is written, with text files that go along. */

import { ArrowUp, FileText, Paperclip, Square, X } from "lucide-preact";
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { post } from "../api";
import { asModel } from "../models";
import { notify } from "../notices";
import { IconButton } from "../parts/Icon";
import { bytes, texts } from "../texts";

interface Given {
  writing: boolean;
  stopping: boolean;
  draft: string;
  onDraft: (text: string) => void;
  /** A message, and the words of it that were typed. */
  onSend: (text: string, words: string) => void;
  onStop: () => void;
  /** The conversation that it is for, whose model counts tokens. */
  session: string | null;
  /** Whether it stands in the middle of an empty conversation. */
  large: boolean;
  /** What stands under it at the left. */
  children?: ComponentChildren;
  /** Where the function is put that opens the box for files. */
  chooser: { current: (() => void) | null };
}

interface Attached {
  name: string;
  text: string;
  /** Once the server has counted them. */
  tokens: number | null;
}

const LARGEST = 1 << 20;

/** A message with its files, each in a fence that nothing in it can close. */
export function withFiles(text: string, files: Pick<Attached, "name" | "text">[]): string {
  const parts = files.map(({ name, text }) => {
    const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, text].filter(Boolean).join("\n\n");
}

export function Composer({ writing, stopping, draft, onDraft, onSend, onStop, session, large, children, chooser }: Given) {
  const [files, attach] = useState<Attached[]>([]);
  const [over, mark] = useState(false);
  const box = useRef<HTMLTextAreaElement>(null);
  const input = useRef<HTMLInputElement>(null);
  chooser.current = () => input.current?.click();
  useEffect(() => box.current?.focus(), []);
  useEffect(() => {
    const element = box.current;
    if (!element) return;
    element.style.height = "auto";
    element.style.height = `${Math.min(element.scrollHeight, 320)}px`;
  }, [draft, large]);
  const send = () => {
    if (writing || !(draft.trim() || files.length)) return;
    onSend(withFiles(draft, files), draft.trim() || files[0]!.name);
    onDraft("");
    attach([]);
  };
  const count = async (file: Attached) => {
    const body = { content: withFiles("", [file]), add_special: false };
    const answer = await post<{ count: number }>(`/tokenize${asModel(session)}`, body);
    attach((before) => before.map((each) => (each === file ? { ...each, tokens: answer.count } : each)));
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
        const attached = { name: file.name, text, tokens: null };
        attach((before) => [...before, attached]);
        // Without the count it can be sent all the same.
        count(attached).catch(() => {});
      } catch {
        notify(texts.composer.notText(file.name), "error");
      }
    }
    box.current?.focus();
  };
  return (
    <form
      class={large ? "composer large" : "composer"}
      onSubmit={(event) => {
        event.preventDefault();
        send();
      }}
      onDragOver={(event) => {
        event.preventDefault();
        mark(true);
      }}
      onDragLeave={() => mark(false)}
      onDrop={(event) => {
        event.preventDefault();
        mark(false);
        void take([...(event.dataTransfer?.files ?? [])]);
      }}
    >
      <div class={over ? "composer-box over" : "composer-box"}>
        {files.length > 0 && (
          <ul class="files">
            {files.map((file, at) => (
              <li>
                <FileText size={16} aria-hidden="true" />
                <span class="item-text">{file.name}</span>
                <span class="hint">{file.tokens === null ? texts.composer.counting : texts.composer.tokens(file.tokens)}</span>
                <IconButton icon={X} label={texts.composer.detach(file.name)} onClick={() => attach(files.filter((_, other) => other !== at))} />
              </li>
            ))}
          </ul>
        )}
        <textarea
          ref={box}
          id="message"
          rows={large ? 2 : 1}
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
        <div class="composer-tools">
          <input
            ref={input}
            type="file"
            multiple
            hidden
            aria-label={texts.composer.attach}
            onChange={(event) => {
              void take([...(event.currentTarget.files ?? [])]);
              event.currentTarget.value = "";
            }}
          />
          <IconButton icon={Paperclip} label={texts.composer.attach} onClick={() => input.current?.click()} />
          <span class="composer-about">{children}</span>
          {writing ? (
            <IconButton icon={Square} class="send stop" label={stopping ? texts.composer.stopping : texts.composer.stop} disabled={stopping} onClick={onStop} />
          ) : (
            <IconButton icon={ArrowUp} class="send" label={texts.composer.send} disabled={!(draft.trim() || files.length)} submit />
          )}
        </div>
      </div>
      <p id="composer-keys" class="hint keys-hint">
        {texts.composer.keys}
      </p>
    </form>
  );
}
