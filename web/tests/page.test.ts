import { describe, expect, it } from "vitest";
import { batch } from "../src/drawing";
import { difference } from "../src/difference";
import { lex, safeLink } from "../src/markdown";
import { link, parse } from "../src/route";
import { asked, defaults, fromTurn } from "../src/settings";
import { EventParser, ReplyText } from "../src/stream";
import { Tree, lines } from "../src/tree";
import type { Told } from "../src/conversation";
import { bits, offsets, surprise } from "../src/views/Tokens";
import { filesIn, withFiles } from "../src/attachments";
import { figures } from "../src/views/ReuseBar";
import type { Branch, TreeTurn, Turn } from "../src/api";

const bytes = (text: string) => [...new TextEncoder().encode(text)];
const token = (text: string, logprob = -1) => ({ token: text, logprob, bytes: bytes(text), top_logprobs: [] });

describe("events", () => {
  it("are the same however they are cut", () => {
    const data = new TextEncoder().encode('data: {"a":"é"}\n\n: still there\n\ndata: [DONE]\n\n');
    for (let cut = 0; cut <= data.length; cut += 1) {
      const parser = new EventParser();
      expect([...parser.push(data.slice(0, cut)), ...parser.push(data.slice(cut))]).toEqual(['{"a":"é"}', "[DONE]"]);
    }
  });

  it("of megabytes are put together once, however many parts they have", () => {
    const parser = new EventParser();
    const part = new TextEncoder().encode("x".repeat(1 << 16));
    parser.push(new TextEncoder().encode("data: "));
    for (let at = 0; at < 200; at += 1) expect(parser.push(part)).toEqual([]);
    expect(parser.push(new TextEncoder().encode("\n"))).toEqual([]);
    expect(parser.push(new TextEncoder().encode("\ndata: b\n\n")).map((each) => each.length)).toEqual([200 << 16, 1]);
  });

  it("add up to a reply behind its beginning", () => {
    const reply = new ReplyText({ text: "so ", reasoning: "hm" });
    reply.take({ choices: [{ delta: { content: "far" }, logprobs: null, finish_reason: "stop" }] });
    expect(reply).toMatchObject({ text: "so far", reasoning: "hm", finish: "stop" });
  });

  it("add up to a reply", () => {
    const reply = new ReplyText();
    const delta = (delta: object, finish_reason: string | null = null) =>
      reply.take({ choices: [{ delta, logprobs: null, finish_reason }] });
    delta({ reasoning_content: "hm" });
    delta({ content: "a" });
    delta({ content: "b", tool_calls: [{ index: 0, id: "x", function: { name: "f", arguments: "{" } }] });
    delta({ tool_calls: [{ index: 0, function: { arguments: "}" } }] }, "tool_calls");
    expect(reply).toMatchObject({ text: "ab", reasoning: "hm", finish: "tool_calls" });
    expect(reply.calls).toEqual([{ id: "x", type: "function", function: { name: "f", arguments: "{}" } }]);
  });
});

const KINDS = { temperature: "number", dry_breakers: "texts", logit_bias: "biases" } as const;
const KNOWN = Object.entries(KINDS).map(([name, kind]) => {
  return { name, kind, low: null, high: null, default: "", help: "", common: true };
});

describe("settings", () => {
  it("come back from the turn that was asked with them", () => {
    const sampling = { temperature: 0, dry_breakers: ["a"], logit_bias: ["7=-100"] };
    const settings = { ...defaults(), sampling, overflow: "shift", reasoning_budget: 9 };
    const sent = { temperature: 0, dry_breakers: ["a"], logit_bias: { "7": -100 } };
    const said = { ...sent, overflow: "shift", reasoning_budget: 9, timeout: 1 };
    expect(fromTurn(said, KNOWN)).toEqual(settings);
    expect(asked(settings)).toMatchObject({ ...sent, perdure: { overflow: "shift", keep_partial: true } });
  });

  it("hold a reply that goes on from a text to no form of its own", () => {
    const settings = { ...defaults(), output: "json" as const };
    expect(asked(settings)).toHaveProperty("response_format");
    expect(asked(settings, true)).toMatchObject({ continue_final_message: true });
    expect(asked(settings, true)).not.toHaveProperty("response_format");
    expect(fromTurn({ continue_final_message: true }, KNOWN)).toEqual(defaults());
  });
});

describe("a tree", () => {
  const turn = (id: string, parent: string | null, at: number): TreeTurn => ({
    id,
    parent,
    turn: at,
    kind: "turn",
    said: id,
    reply: "",
    finish_reason: "stop",
    created: at,
  });
  const branch = (name: string, at: string, updated: number): Branch => ({ name, at, turns: 1, updated });
  const tree = new Tree(
    [turn("s", null, 0), turn("a", "s", 1), turn("b", "a", 2), turn("c", "a", 2), turn("d", "c", 3)],
    [branch("one", "b", 1), branch("two", "d", 2), branch("three", "c", 3)],
    [],
  );

  it("knows paths, siblings and who leads where", () => {
    expect(tree.pathOf("two")).toEqual(["s", "a", "c", "d"]);
    expect(tree.siblings("b")).toEqual(["b", "c"]);
    expect(tree.siblings("s")).toEqual(["s"]);
    expect(tree.sessionThrough("c")?.name).toBe("three");
    expect(tree.sessionThrough("b")?.name).toBe("one");
  });

  it("is laid out in lines that end where it branches", () => {
    const [root] = lines(tree);
    expect(root!.turns.map((each) => each.id)).toEqual(["s", "a"]);
    expect(root!.branches.map((each) => each.turns.map((one) => one.id))).toEqual([["b"], ["c", "d"]]);
  });

  it("may be deep", () => {
    const deep = Array.from({ length: 20_000 }, (_, at) => turn(String(at), at ? String(at - 1) : null, at));
    const [line] = lines(new Tree(deep, [], []));
    expect(line!.turns.length).toBe(20_000);
  });
});

describe("markdown", () => {
  it("has formulas, and prices are none", () => {
    const kinds = (text: string) => (lex(text)[0] as { tokens?: { type: string }[] }).tokens?.map((each) => each.type);
    expect(kinds("so $x^2$ is")).toContain("math");
    expect(kinds("it costs $5 or $6 now")).not.toContain("math");
    expect(lex("$$\nx\n$$")[0]!.type).toBe("math");
    expect(lex("\\[ x \\]")[0]!.type).toBe("math");
  });

  interface Inner {
    type: string;
    raw: string;
    tokens?: Inner[];
    items?: Inner[];
  }
  const read = (text: string) => lex(text) as Inner[];
  const depth = (tokens: Inner[] = []): number =>
    1 + Math.max(0, ...tokens.flatMap((each) => [each, ...(each.items ?? [])]).map((each) => depth(each.tokens)));

  it("is a text where it is too deep (Y21)", () => {
    for (const text of ["- ".repeat(500), "> ".repeat(500), ">".repeat(20_000), "1. ".repeat(500), "*a ".repeat(500)]) {
      const tokens = read(text);
      expect(depth(tokens)).toBeLessThan(80);
      expect(tokens.map((each) => each.raw).join("").trim() === text.trim()).toBe(true);
    }
    expect(depth(read("- a\n  - b\n    - **c**"))).toBeGreaterThan(4);
  });

  it("is a text where it would take long to read (Y22)", () => {
    const hostile = ["_a ", "[a](", "**a ", "`a", "![", "a@", "<a ", "~a ", "$a ", "http://a", "[a][b", "\\(a "];
    for (const text of [...hostile.map((each) => each.repeat(20_000)), "a".repeat(60_000)]) {
      const tokens = read(`so ${text}\n\nand **this**`);
      const [first, last] = [tokens[0]!.tokens!, tokens.at(-1)!.tokens!];
      expect(first.map((each) => each.type)).toEqual(["text"]);
      expect(first[0]!.raw.trim() === `so ${text}`.trim()).toBe(true);
      expect(last.map((each) => each.type)).toEqual(["text", "strong"]);
    }
    for (const text of ["$$a\n", "\\[a\n"]) expect(read(text.repeat(15_000))).toHaveLength(1);
  });

  it("of a long reply is drawn as ever (Y22)", () => {
    const paragraph = "Some *words* with `code`, [a link](https://example.org/) and $x^2$. ".repeat(20);
    for (const each of read(`${paragraph}\n\n`.repeat(100)).filter((each) => each.type === "paragraph"))
      expect(each.tokens!.filter((inner) => inner.type !== "text")).toHaveLength(80);
  });

  it("follows only addresses that are safe", () => {
    for (const bad of ["javascript:alert(1)", " JaVaScRiPt:x", "data:text/html,x", "vbscript:x", "file:///etc", "/v1/x"])
      expect(safeLink(bad)).toBeUndefined();
    expect(safeLink("https://example.org/")).toBe("https://example.org/");
  });
});

describe("small things", () => {
  it("compares word by word", () => {
    const [left, right] = difference("the cat sat down", "the dog sat up");
    expect(left.filter((each) => each.changed).map((each) => each.text.trim())).toEqual(["cat", "down"]);
    expect(right.map((each) => each.text).join("")).toBe("the dog sat up");
    expect(difference("same", "same")[0]).toEqual([{ text: "same", changed: false }]);
  });

  it("puts files into fences that they cannot close", () => {
    expect(withFiles("q", [{ name: "a", text: "```\nx\n```\n" }])).toBe("a:\n````\n```\nx\n```\n````\n\nq");
  });

  it("finds the files of a message again, and nothing that a person typed", () => {
    const files = [
      { name: "a note.md", text: "```\nx\n```" },
      { name: "b.txt", text: "" },
    ];
    for (const text of ["", "q", "one:\n```\ncode\n```"]) expect(filesIn(withFiles(text, files))).toEqual({ files, text });
    for (const text of ["Explain this:\n```\ncode\n```", "a.py:\n```\nnot closed", "a.py:\n```\nx\n``` and on"])
      expect(filesIn(text)).toEqual({ files: [], text });
  });

  it("finds where the answer starts among the tokens", () => {
    const tokens = ["<think>", "so", "</think>", "Yes", " é"].map((text) => token(text));
    const { start, ends } = offsets(tokens, "Yes é");
    expect(ends.filter((end) => end <= start).length).toBe(3);
    expect([surprise(0), surprise(-100)]).toEqual([0, 5]);
    expect([bits(0), bits(Math.log(0.25))]).toEqual([0, 2]);
  });

  it("keeps the place in the address", () => {
    for (const route of [
      { view: "talk", session: "a/b ü~2" },
      { view: "compare", session: "a", other: "b c" },
      { view: "sessions" },
      { view: "talk", session: null },
    ] as const)
      expect(parse(link(route))).toEqual(route);
    expect(parse("#/c/%E0%A4%A")).toEqual({ view: "talk", session: "%E0%A4%A" });
  });

  it("tells what was reused from the turn itself", () => {
    const usage = { prompt_tokens: 10, cached_tokens: 8, slot_tokens: 8, completion_tokens: 5, first_token_ms: 40, decode_ms: 400 };
    const turn = { usage, why: "the rest is new" } as unknown as Turn;
    expect(figures(turn, undefined)).toMatchObject({
      computed: 2,
      first: 0.04,
      speed: 10,
      tiers: { slot: 8 },
      seconds: {},
      why: "the rest is new",
      guesses: [],
    });
  });

  it("tells the time of each tier, while the reply is there and later", () => {
    const usage = { prompt_tokens: 10, cached_tokens: 8, disk_tokens: 8, disk_us: 2500, computed_us: 40_000 };
    const timings = { queued: 0, prefill: 0.04, decode: 1, decode_speed: 9 };
    const told = { reuse: { tiers: { disk: 8 }, seconds: { disk: 0.0025 }, computed: 2, why: "" }, timings } as unknown as Told;
    const turn = { usage, why: "" } as unknown as Turn;
    expect(figures(turn, undefined).seconds).toEqual({ disk: 0.0025, computed: 0.04 });
    expect(figures(turn, told).seconds).toEqual(figures(turn, undefined).seconds);
  });

  it("tells what was guessed ahead and what a grammar forced", () => {
    const timings = { queued: 0, prefill: 0, decode: 1, decode_speed: 9, drafted_tokens: 12, accepted_tokens: 9, forced_tokens: 3 };
    const told = { reuse: { tiers: {}, computed: 1, why: "" }, timings } as unknown as Told;
    const turn = { usage: { completion_tokens: 20 }, why: "" } as unknown as Turn;
    expect(figures(turn, told).guesses).toEqual(["12 guessed, 9 right", "3 forced by the grammar"]);
  });
});

describe("a batch of turns to draw", () => {
  const waiting = (sizes: number[]) => sizes.map((size, at) => ({ turn: at + 1, size, draw: () => {} }));
  const drawn = (sizes: number[], at: number) => batch(waiting(sizes), at).map((each) => each.turn);

  it("is a few turns, those in view first", () => {
    expect(drawn(Array(100).fill(10), 50).sort()).toEqual([48, 49, 50, 51]);
    expect(drawn(Array(100).fill(10), 400)).toEqual([100, 99, 98, 97]);
    expect(drawn([10, 10], 1)).toEqual([1, 2]);
    expect(drawn([], 1)).toEqual([]);
  });

  it("is fewer where they are long, and never none", () => {
    expect(drawn([10, 3000, 3000, 3000], 1)).toEqual([1, 2]);
    expect(drawn([1_000_000, 10], 1)).toEqual([1]);
  });
});
