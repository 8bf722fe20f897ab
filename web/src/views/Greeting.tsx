/** An empty conversation: a greeting, and three ways to begin. */

import { Code, FileText, PenLine, type LucideIcon } from "lucide-preact";
import { Mark } from "../parts/Icon";
import { texts } from "../texts";

interface Given {
  onWrite: (text: string) => void;
  onFile: () => void;
}

export function Greeting() {
  const hour = new Date().getHours();
  const part = hour < 5 || hour >= 18 ? "evening" : hour < 12 ? "morning" : "afternoon";
  return (
    <div class="greeting">
      <Mark size={44} />
      <p class="greeting-words">{texts.greeting.hello[part]}</p>
      <p class="hint">{texts.greeting.note}</p>
    </div>
  );
}

export function Beginnings({ onWrite, onFile }: Given) {
  const { beginnings } = texts.greeting;
  return (
    <div class="beginnings" role="group" aria-label={texts.greeting.label}>
      <Beginning icon={PenLine} text={beginnings.write} onPick={() => onWrite(beginnings.write.starts)} />
      <Beginning icon={Code} text={beginnings.code} onPick={() => onWrite(beginnings.code.starts)} />
      <Beginning icon={FileText} text={beginnings.file} onPick={onFile} />
    </div>
  );
}

function Beginning({ icon: Icon, text, onPick }: { icon: LucideIcon; text: { title: string; note: string }; onPick: () => void }) {
  return (
    <button type="button" class="beginning" onClick={onPick}>
      <Icon size={18} strokeWidth={1.75} aria-hidden="true" />
      <strong>{text.title}</strong>
      <span class="hint">{text.note}</span>
    </button>
  );
}
