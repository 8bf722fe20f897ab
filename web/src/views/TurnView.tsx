/** One turn: what was said, the reply, and what can be done with both. */

import { Bookmark, ChevronLeft, ChevronRight, GitFork, Palette, Pencil, PenLine, RefreshCw, StepForward } from "lucide-preact";
import type { ComponentChildren } from "preact";
import { memo } from "preact/compat";
import { useLayoutEffect, useState } from "preact/hooks";
import type { Call, Message, Turn } from "../api";
import { filesIn, withFiles } from "../attachments";
import { Copy } from "../code";
import type { Told } from "../conversation";
import type { DrawQueue } from "../drawing";
import { Markdown } from "../markdown";
import { IconButton } from "../parts/Icon";
import type { Begun } from "../stream";
import { texts } from "../texts";
import { FileCard, Pictures } from "./Attached";
import { ReuseLine } from "./ReuseBar";
import { Tokens } from "./Tokens";

export interface Actions {
  branch: (turn: number, said: Message[], begun?: Begun) => void;
  goOn: () => void;
  fork: (turn: number) => void;
  remember: (turn: number) => void;
  inside: (turn: number) => void;
  step: (turn: number, by: number) => void;
  answer: (results: Message[]) => void;
}

interface Given {
  turn: Turn;
  told: Told | undefined;
  isLast: boolean;
  busy: boolean;
  at: number;
  of: number;
  actions: Actions;
  /** Who draws it, where that can wait; without, it is drawn at once. */
  queue: DrawQueue | null;
}

export const TurnView = memo(({ turn, told, isLast, busy, at, of, actions, queue }: Given) => {
  const [drawn, setDrawn] = useState(queue === null);
  useLayoutEffect(() => {
    if (!drawn) return queue!.add({ turn: turn.turn, size: size(turn), draw: () => setDrawn(true) });
  }, [drawn]);
  const [editing, edit] = useState<"said" | "reply" | null>(null);
  const [asTokens, showTokens] = useState(false);
  const own = turn.messages.findLast((message) => message.role === "user");
  const canContinue = isLast && ["length", "cancelled"].includes(turn.finish_reason);
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.target !== event.currentTarget || event.ctrlKey || event.metaKey || event.altKey) return;
    const does: Record<string, () => void> = {
      e: () => edit("said"),
      r: () => actions.branch(turn.turn, turn.messages),
      f: () => actions.fork(turn.turn),
      m: () => actions.remember(turn.turn),
      i: () => turn.reply && actions.inside(turn.turn),
      ArrowLeft: () => actions.step(turn.turn, -1),
      ArrowRight: () => actions.step(turn.turn, 1),
      ArrowUp: () => document.getElementById(`turn-${turn.turn - 1}`)?.focus(),
      ArrowDown: () => document.getElementById(`turn-${turn.turn + 1}`)?.focus(),
    };
    const act = does[event.key];
    if (act) {
      event.preventDefault();
      act();
    }
  };
  const parts = filesIn(own?.content ?? "");
  const saveSaid = (words: string) => {
    edit(null);
    // What goes along stays.
    const text = withFiles(words, parts.files);
    const changed = turn.messages.map((message) => (message === own ? { ...message, content: text } : message));
    actions.branch(turn.turn, changed);
  };
  const goOnFrom = (text: string) =>
    actions.branch(turn.turn, turn.messages, { text, reasoning: turn.reply?.reasoning_content ?? "" });
  const outer = {
    id: `turn-${turn.turn}`,
    tabIndex: 0,
    "aria-label": texts.talk.turnLabel(turn.turn),
    onKeyDown,
  };
  if (!drawn) return <article {...outer} class="turn undrawn" />;
  return (
    <article {...outer} class="turn">
      {turn.kind === "fold" && <p class="note">{texts.talk.fold}</p>}
      {turn.dropped > 0 && <p class="note">{texts.talk.dropped(turn.dropped)}</p>}
      {editing === "said" ? (
        <Editor text={parts.text} save={texts.talk.save} onSave={saveSaid} onCancel={() => edit(null)} />
      ) : (
        turn.messages.map((message) => (
          <Said message={message}>
            {message === own && (
              <span class="on-hover">
                <IconButton icon={Pencil} label={texts.talk.edit} disabled={busy} onClick={() => edit("said")} />
              </span>
            )}
          </Said>
        ))
      )}
      {turn.reply && (
        <>
          {editing === "reply" ? (
            <Editor
              text={turn.reply.content ?? ""}
              save={texts.talk.saveReply}
              onSave={(text) => {
                edit(null);
                goOnFrom(text);
              }}
              onCancel={() => edit(null)}
            />
          ) : asTokens && told?.logprobs.length ? (
            <Tokens
              tokens={told.logprobs}
              text={turn.reply.content ?? ""}
              lead={told.lead}
              onBranch={goOnFrom}
            />
          ) : (
            <ReplyBody
              text={turn.reply.content ?? ""}
              reasoning={turn.reply.reasoning_content ?? ""}
              calls={turn.reply.tool_calls ?? []}
              {...(isLast && turn.finish_reason === "tool_calls" && !busy ? { onAnswer: actions.answer } : {})}
            />
          )}
          {texts.talk.endings[turn.finish_reason] && <p class="note">{texts.talk.endings[turn.finish_reason]}</p>}
        </>
      )}
      <div class="actions" role="group" aria-label={texts.talk.turnLabel(turn.turn)}>
        {of > 1 && (
          <span class="siblings">
            <IconButton icon={ChevronLeft} label={texts.talk.previous} onClick={() => actions.step(turn.turn, -1)} />
            <span aria-label={texts.talk.siblings(at, of)} role="img">
              {at}/{of}
            </span>
            <IconButton icon={ChevronRight} label={texts.talk.next} onClick={() => actions.step(turn.turn, 1)} />
          </span>
        )}
        <span class="on-hover">
          <Copy text={turn.reply?.content ?? ""} label={texts.talk.copy} />
          {turn.reply && (
            <>
              <IconButton icon={RefreshCw} label={texts.talk.regenerate} disabled={busy} onClick={() => actions.branch(turn.turn, turn.messages)} />
              <IconButton icon={PenLine} label={texts.talk.editReply} disabled={busy} onClick={() => edit("reply")} />
            </>
          )}
          <IconButton icon={GitFork} label={texts.talk.fork} onClick={() => actions.fork(turn.turn)} />
          <IconButton icon={Bookmark} label={texts.talk.remember} onClick={() => actions.remember(turn.turn)} />
          {!!told?.logprobs.length && (
            <IconButton icon={Palette} label={texts.talk.tokens} pressed={asTokens} onClick={() => showTokens(!asTokens)} />
          )}
        </span>
        {canContinue && (
          <button type="button" class="plain-button" disabled={busy} onClick={() => actions.goOn()}>
            <StepForward size={15} aria-hidden="true" /> {texts.talk.continue}
          </button>
        )}
        {turn.reply && <ReuseLine turn={turn} told={told} onInside={() => actions.inside(turn.turn)} />}
      </div>
    </article>
  );
});

/** Characters of a turn. */
function size(turn: Turn): number {
  const count = (message: Message) => (message.content?.length ?? 0) + (message.reasoning_content?.length ?? 0);
  return turn.messages.reduce((sum, message) => sum + count(message), turn.reply ? count(turn.reply) : 0);
}

export function Said({ message, children }: { message: Message; children?: ComponentChildren }) {
  if (message.role === "user" || message.role === "system" || message.role === "developer") {
    const { files, text } = filesIn(message.content ?? "");
    return (
      <section class={`said ${message.role}`}>
        <h2 class={message.role === "user" ? "unseen" : "who"}>{message.role === "user" ? texts.talk.you : texts.talk.system}</h2>
        {children}
        <div class="said-parts">
          {!!message.images?.length && <Pictures media={message.images} />}
          {files.map((file) => (
            <FileCard {...file} />
          ))}
          {(text || !(files.length || message.images?.length)) && (
            <div class="bubble">
              <Markdown text={text} />
            </div>
          )}
        </div>
      </section>
    );
  }
  if (message.role === "tool")
    return (
      <section class="card">
        <h2 class="who">{texts.talk.tool(message.name ?? "")}</h2>
        <pre tabIndex={0}>{message.content}</pre>
      </section>
    );
  return <ReplyBody text={message.content ?? ""} reasoning={message.reasoning_content ?? ""} calls={message.tool_calls ?? []} />;
}

interface ReplyGiven {
  text: string;
  reasoning: string;
  calls: Call[];
  streaming?: boolean;
  onAnswer?: (results: Message[]) => void;
}

export function ReplyBody({ text, reasoning, calls, streaming = false, onAnswer }: ReplyGiven) {
  return (
    <section class="said assistant">
      <h2 class="unseen">{texts.talk.model}</h2>
      {reasoning && (
        <details class="reasoning">
          <summary>
            {streaming && !text ? texts.talk.thinking : texts.talk.reasoning(reasoning.trim().split(/\s+/).length)}
          </summary>
          <Markdown text={reasoning} />
        </details>
      )}
      <Markdown text={text} streaming={streaming} />
      {calls.length > 0 && <Calls calls={calls} {...(onAnswer ? { onAnswer } : {})} />}
    </section>
  );
}

function Calls({ calls, onAnswer }: { calls: Call[]; onAnswer?: (results: Message[]) => void }) {
  const [results, write] = useState<Record<number, string>>({});
  const send = () =>
    onAnswer?.(
      calls.map((call, at) => ({
        role: "tool",
        content: results[at] ?? "",
        tool_call_id: call.id,
        name: call.function.name,
      })),
    );
  return (
    <>
      {calls.map((call, at) => (
        <section class="card call">
          <h3>{texts.talk.call(call.function.name)}</h3>
          <pre tabIndex={0} aria-label={texts.talk.arguments}>
            {pretty(call.function.arguments)}
          </pre>
          {onAnswer && (
            <label>
              {texts.talk.result}
              <textarea
                rows={2}
                value={results[at] ?? ""}
                onInput={(event) => write({ ...results, [at]: event.currentTarget.value })}
              />
            </label>
          )}
        </section>
      ))}
      {onAnswer && (
        <button type="button" onClick={send}>
          {texts.talk.answerCall}
        </button>
      )}
    </>
  );
}

function pretty(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

interface EditorGiven {
  text: string;
  save: string;
  onSave: (text: string) => void;
  onCancel: () => void;
}

function Editor({ text, save, onSave, onCancel }: EditorGiven) {
  const [draft, write] = useState(text);
  return (
    <form
      class="editor"
      onSubmit={(event) => {
        event.preventDefault();
        if (draft.trim()) onSave(draft);
      }}
      onKeyDown={(event) => {
        if (event.key === "Escape") {
          event.stopPropagation();
          onCancel();
        } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.target instanceof HTMLTextAreaElement) {
          event.preventDefault();
          if (draft.trim()) onSave(draft);
        }
      }}
    >
      <textarea
        aria-label={texts.talk.newText}
        rows={Math.min(16, draft.split("\n").length + 2)}
        value={draft}
        ref={(element) => element?.focus({ preventScroll: true })}
        onInput={(event) => write(event.currentTarget.value)}
      />
      <div class="row">
        <button type="submit">{save}</button>
        <button type="button" class="quiet" onClick={onCancel}>
          {texts.talk.cancel}
        </button>
        <span class="hint">{texts.talk.editKeys}</span>
      </div>
    </form>
  );
}
