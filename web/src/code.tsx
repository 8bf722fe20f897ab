/** Code with colours and a button that copies it. */

import type { createLowlight } from "lowlight";
import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { Check, Copy as CopyIcon } from "lucide-preact";
import { notify } from "./notices";
import { IconButton } from "./parts/Icon";
import { texts } from "./texts";

type Highlighter = ReturnType<typeof createLowlight>;
type Nodes = ReturnType<Highlighter["highlight"]>["children"];

let loading: Promise<Highlighter> | null = null;

const LONGEST = 50_000;

export function CodeBlock({ text, language, plain }: { text: string; language: string; plain: boolean }) {
  const name = language.trim().split(/\s/)[0]!.toLowerCase();
  const [shown, show] = useState<{ text: string; nodes: Nodes } | null>(null);
  useEffect(() => {
    // While it is being written it changes with every token.
    if (plain || !name || text.length > LONGEST) return;
    let wanted = true;
    loading ??= import("./highlight").then((module) => module.highlighter);
    void loading.then((highlighter) => {
      if (wanted && highlighter.registered(name)) show({ text, nodes: highlighter.highlight(name, text).children });
    });
    return () => {
      wanted = false;
    };
  }, [text, name, plain]);
  return (
    <div class="code">
      <div class="code-head">
        <span>{name}</span>
        <Copy text={text} label={texts.talk.copyCode} />
      </div>
      <pre tabIndex={0}>
        <code>{shown && shown.text === text ? elements(shown.nodes) : text}</code>
      </pre>
    </div>
  );
}

function elements(nodes: Nodes): ComponentChildren[] {
  return nodes.map((node) => {
    if (node.type === "text") return node.value;
    if (node.type !== "element") return null;
    return <span class={(node.properties.className as string[] | undefined)?.join(" ")}>{elements(node.children as Nodes)}</span>;
  });
}

const SHOWN = 1500;

export function Copy({ text, label }: { text: string; label: string }) {
  const [copied, mark] = useState(false);
  const copy = async () => {
    // A browser has a clipboard only for pages of this machine, or that came encrypted.
    if (!navigator.clipboard) return notify(texts.errors.clipboard, "error");
    await navigator.clipboard.writeText(text);
    mark(true);
    setTimeout(() => mark(false), SHOWN);
  };
  return <IconButton icon={copied ? Check : CopyIcon} label={copied ? texts.talk.copied : label} onClick={() => void copy()} />;
}
