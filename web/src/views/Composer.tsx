/** Where a message is written, with files and pictures that go along. */

import { ArrowUp, FileText, Paperclip, Square, X } from "lucide-preact";
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import type { Medium, Message } from "../api";
import { ACCEPTED, begun, counted, read, withFiles, type Attachment } from "../attachments";
import { notifyError } from "../notices";
import { IconButton } from "../parts/Icon";
import { texts } from "../texts";
import { Picture } from "./Attached";

interface Given {
  writing: boolean;
  stopping: boolean;
  draft: string;
  onDraft: (text: string) => void;
  /** A message, and the words of it that were typed. */
  onSend: (message: Message, words: string) => void;
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

export function Composer({ writing, stopping, draft, onDraft, onSend, onStop, session, large, children, chooser }: Given) {
  const [files, attach] = useState<Attachment[]>([]);
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
  const isReady = !writing && !!(draft.trim() || files.length) && !files.some((file) => file.reading);
  const send = () => {
    if (!isReady) return;
    const pictures = files.flatMap((file): Medium[] => (file.picture ? [[0, file.picture.url]] : []));
    const content = withFiles(
      draft,
      files.filter((file) => !file.picture),
    );
    const message: Message = { role: "user", content, ...(pictures.length ? { images: pictures } : {}) };
    onSend(message, draft.trim() || files[0]!.name);
    onDraft("");
    attach([]);
  };
  const change = (id: number, part: Partial<Attachment>) =>
    attach((before) => before.map((each) => (each.id === id ? { ...each, ...part } : each)));
  const takeOne = async (file: File) => {
    let attached: Attachment;
    try {
      attached = begun(file);
    } catch (error) {
      return notifyError(error);
    }
    attach((before) => [...before, attached]);
    try {
      const found = await read(file, attached, session);
      change(attached.id, found);
      if (attached.picture) return;
      // Without the count it can be sent all the same.
      counted({ ...attached, ...found }, session).then((tokens) => change(attached.id, { tokens }), () => {});
    } catch (error) {
      attach((before) => before.filter((each) => each.id !== attached.id));
      notifyError(error);
    }
  };
  const take = (list: File[]) => {
    for (const file of list) void takeOne(file);
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
        take([...(event.dataTransfer?.files ?? [])]);
      }}
    >
      <div class={over ? "composer-box over" : "composer-box"}>
        {files.length > 0 && (
          <ul class="files" aria-label={texts.composer.attached}>
            {files.map((file) => (
              <li key={file.id} class={file.picture ? "with-picture" : undefined} aria-busy={file.reading}>
                {file.picture ? <Picture source={file.picture.file} name={file.name} /> : <FileText size={16} aria-hidden="true" />}
                <span class="item-text">{file.name}</span>
                <span class="hint">
                  {file.reading ? texts.composer.reading : file.tokens === null ? texts.composer.counting : texts.composer.tokens(file.tokens)}
                  {file.pages > 1 && `, ${texts.composer.pages(file.pages)}`}
                </span>
                <IconButton icon={X} label={texts.composer.detach(file.name)} onClick={() => attach(files.filter((other) => other !== file))} />
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
          onPaste={(event) => {
            const pasted = [...(event.clipboardData?.files ?? [])];
            if (!pasted.length) return;
            event.preventDefault();
            take(pasted);
          }}
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
            accept={ACCEPTED}
            aria-label={texts.composer.attach}
            onChange={(event) => {
              take([...(event.currentTarget.files ?? [])]);
              event.currentTarget.value = "";
            }}
          />
          <IconButton icon={Paperclip} label={texts.composer.attach} onClick={() => input.current?.click()} />
          <span class="composer-about">{children}</span>
          {writing ? (
            <IconButton icon={Square} class="send stop" label={stopping ? texts.composer.stopping : texts.composer.stop} disabled={stopping} onClick={onStop} />
          ) : (
            <IconButton icon={ArrowUp} class="send" label={texts.composer.send} disabled={!isReady} submit />
          )}
        </div>
      </div>
      <p id="composer-keys" class="hint keys-hint">
        {texts.composer.keys}
      </p>
    </form>
  );
}
