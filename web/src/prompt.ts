/** A prompt as the model reads it, without the marks of its template. */

const ROLE = /<\|(?:im_start|start_header_id|start|role)\|>\s*(\w+)\s*(?:<\|(?:end_header_id|message|im_middle)\|>)?\s*|<start_of_turn>\s*(\w+)\s*/g;
const MARK = /<\|[^|<>]{1,40}\|>|<\/?s>|<(?:start|end)_of_turn>|\[\/?INST\]|<(?:bos|eos|pad)>/g;

export function plainPrompt(text: string): string {
  return text
    .replace(ROLE, (_, one?: string, other?: string) => ` ${one ?? other}: `)
    .replace(MARK, " ")
    .replace(/\s+/g, " ")
    .trim();
}
