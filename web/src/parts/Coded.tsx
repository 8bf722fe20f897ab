/** A sentence in which words between backticks are code. */

export function Coded({ text }: { text: string }) {
  return <>{text.split("`").map((part, at) => (at % 2 ? <code>{part}</code> : part))}</>;
}
