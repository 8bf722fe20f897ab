/** Markdown as elements. No text ever becomes markup: what is HTML in a reply is shown as the text it is. */

import { Lexer, type MarkedExtension, type Token, type Tokens, type TokensList, Marked } from "marked";
import type { ComponentChildren, VNode } from "preact";
import { memo } from "preact/compat";
import { CodeBlock } from "./code";
import { Formula } from "./formula";

interface MathToken {
  type: "math";
  raw: string;
  text: string;
  display: boolean;
}

const BLOCK = [
  ["$$", "$$"],
  ["\\[", "\\]"],
] as const;
/** Of a formula that is a block: what only begins like one is not read to the end of the reply. */
const LONGEST = 4000;
const INLINE = [
  /^\$\$([^$\n]+?)\$\$/,
  /^\$(?!\s)((?:\\.|[^$\\\n])+?)(?<!\s)\$(?!\d)/,
  /^\\\(([^\n]+?)\\\)/,
  /^\\\[([^\n]+?)\\\]/,
];

function blockMath(source: string): MathToken | undefined {
  for (const [open, close] of BLOCK) {
    if (!source.startsWith(open)) continue;
    let end = source.slice(0, LONGEST).indexOf(`${close}\n`, open.length + 1);
    if (end < 0 && source.length <= LONGEST && source.endsWith(close)) end = source.length - close.length;
    if (end <= open.length) continue;
    const raw = source.slice(0, end + close.length + 1);
    return { type: "math", raw, text: source.slice(open.length, end).trim(), display: true };
  }
  return undefined;
}

/** Where in a paragraph a formula begins that is a block. The rest of the reply is looked at when it comes. */
function nextBlockMath(source: string): number | undefined {
  for (const { index, 0: found } of source.matchAll(/\n(?:\n|\$\$|\\\[)/g)) {
    if (found === "\n\n") return undefined;
    if (blockMath(source.slice(index + 1))) return index;
  }
  return undefined;
}

function inlineMath(source: string): MathToken | undefined {
  for (const pattern of INLINE) {
    const found = pattern.exec(source);
    if (found) return { type: "math", raw: found[0], text: found[1]!.trim(), display: false };
  }
  return undefined;
}

const extension: MarkedExtension = {
  extensions: [
    {
      name: "math",
      level: "block",
      start: nextBlockMath,
      tokenizer: blockMath,
    },
    {
      name: "math",
      level: "inline",
      start: (source) => source.match(/\$|\\[([]/)?.index,
      tokenizer: inlineMath,
    },
  ],
};
const marked = new Marked({ gfm: true, breaks: false }, extension);

const DEPTH = 24;
/** How often a character may be read, in all: from every mark, marked reads on to the end of its paragraph. */
const TIMES = 250;
const LEAST = 4e6;
const MARKS = /[*_`[\]<~$\\!@]|:\/\/|www\./g;
/** A long word, which marked reads anew at each of its characters, in search of an address of mail. */
const WORDS = /[^\s*_`[\]<~\\!@]{100,}/g;

/** A lexer in a bounded time: what is too deep or too much of is a text. */
class BoundedLexer extends Lexer {
  private depth = 0;
  private left = 0;

  override lex(source: string): TokensList {
    this.left = Math.max(LEAST, TIMES * source.length);
    return super.lex(source);
  }

  override blockTokens(source: string, tokens?: Token[], clipped?: boolean): Token[];
  override blockTokens(source: string, tokens?: TokensList, clipped?: boolean): TokensList;
  override blockTokens(source: string, tokens: Token[] = [], clipped?: boolean): Token[] {
    if (this.depth >= DEPTH) return plain(source, tokens);
    return this.deeper(() => super.blockTokens(source, tokens, clipped));
  }

  override inlineTokens(source: string, tokens: Token[] = []): Token[] {
    const words = [...source.matchAll(WORDS)].reduce((sum, [word]) => sum + word.length ** 2, 0);
    const work = (source.match(MARKS)?.length ?? 0) * source.length + words;
    if (this.depth >= DEPTH || work > this.left) return plain(source, tokens);
    this.left -= work;
    return this.deeper(() => super.inlineTokens(source, tokens));
  }

  private deeper(read: () => Token[]): Token[] {
    this.depth += 1;
    try {
      return read();
    } finally {
      this.depth -= 1;
    }
  }
}

function plain(source: string, tokens: Token[]): Token[] {
  if (source) tokens.push({ type: "text", raw: source, text: source });
  return tokens;
}

export function lex(text: string): Token[] {
  return new BoundedLexer(marked.defaults).lex(text);
}

const SAFE = /^(https?:|mailto:)/i;

/** An address that may be followed, or none: a reply can name any scheme. */
export function safeLink(href: string): string | undefined {
  return SAFE.test(href.trim()) ? href.trim() : undefined;
}

function inline(tokens: Token[] | undefined): ComponentChildren[] {
  return (tokens ?? []).map((token) => {
    switch (token.type) {
      case "strong":
        return <strong>{inline(token.tokens)}</strong>;
      case "em":
        return <em>{inline(token.tokens)}</em>;
      case "del":
        return <del>{inline(token.tokens)}</del>;
      case "codespan":
        return <code>{(token as Tokens.Codespan).text}</code>;
      case "br":
        return <br />;
      case "link": {
        const href = safeLink((token as Tokens.Link).href);
        return href ? <Outside href={href}>{inline(token.tokens)}</Outside> : <>{inline(token.tokens)}</>;
      }
      case "image": {
        // Nothing is fetched from elsewhere because a reply says so.
        const image = token as Tokens.Image;
        const href = safeLink(image.href);
        return href ? <Outside href={href}>{image.text || href}</Outside> : <>{image.text}</>;
      }
      case "math":
        return <Formula text={(token as unknown as MathToken).text} display={false} />;
      case "text":
        return token.tokens ? <>{inline(token.tokens)}</> : <>{unescape((token as Tokens.Text).text)}</>;
      case "escape":
        return <>{unescape((token as Tokens.Escape).text)}</>;
      default:
        return <>{token.raw}</>;
    }
  });
}

function Outside({ href, children }: { href: string; children: ComponentChildren }) {
  return (
    <a href={href} target="_blank" rel="noopener noreferrer nofollow">
      {children}
    </a>
  );
}

const ENTITIES: Record<string, string> = { amp: "&", lt: "<", gt: ">", quot: '"', "#39": "'" };

/** The lexer may have escaped a text for HTML; here it becomes a text node, which needs none of it. */
function unescape(text: string): string {
  return text.replace(/&(amp|lt|gt|quot|#39);/g, (_, name: string) => ENTITIES[name]!);
}

function block(token: Token, streaming: boolean): VNode | null {
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading": {
      // The page has its own first levels.
      const Tag = `h${Math.min(6, (token as Tokens.Heading).depth + 2)}` as "h3";
      return <Tag>{inline(token.tokens)}</Tag>;
    }
    case "paragraph":
      return <p>{inline(token.tokens)}</p>;
    case "text":
      return <>{token.tokens ? inline(token.tokens) : unescape((token as Tokens.Text).text)}</>;
    case "code":
      return (
        <CodeBlock text={(token as Tokens.Code).text} language={(token as Tokens.Code).lang ?? ""} plain={streaming} />
      );
    case "blockquote":
      return <blockquote>{blocks(token.tokens ?? [], streaming)}</blockquote>;
    case "hr":
      return <hr />;
    case "list":
      return list(token as Tokens.List, streaming);
    case "table":
      return table(token as Tokens.Table);
    case "math":
      return <Formula text={(token as unknown as MathToken).text} display={true} />;
    default:
      return <p>{token.raw}</p>;
  }
}

function list(token: Tokens.List, streaming: boolean): VNode {
  const items = token.items.map((item) => (
    <li>
      {item.task && <input type="checkbox" checked={item.checked ?? false} disabled aria-label={item.text} />}
      {blocks(item.tokens, streaming)}
    </li>
  ));
  return token.ordered ? <ol start={Number(token.start) || 1}>{items}</ol> : <ul>{items}</ul>;
}

function table(token: Tokens.Table): VNode {
  const align = (at: number) => (token.align[at] ? `align-${token.align[at]}` : undefined);
  return (
    <div class="wide" tabIndex={0} role="region" aria-label="Table">
      <table>
        <thead>
          <tr>
            {token.header.map((cell, at) => (
              <th class={align(at)}>{inline(cell.tokens)}</th>
            ))}
          </tr>
        </thead>
        <tbody>
          {token.rows.map((row) => (
            <tr>
              {row.map((cell, at) => (
                <td class={align(at)}>{inline(cell.tokens)}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function blocks(tokens: Token[], streaming: boolean): (VNode | null)[] {
  return tokens.map((token) => block(token, streaming));
}

/** One top-level block, drawn again only when its source has changed: a reply grows at its end. */
const Block = memo(
  ({ token, streaming }: { token: Token; streaming: boolean }) => block(token, streaming),
  (before, now) => before.token.raw === now.token.raw && before.streaming === now.streaming,
);

export const Markdown = memo(({ text, streaming = false }: { text: string; streaming?: boolean }) => {
  const tokens = lex(text);
  return (
    <div class="markdown">
      {tokens.map((token, at) => (
        <Block key={at} token={token} streaming={streaming && at === tokens.length - 1} />
      ))}
    </div>
  );
});
