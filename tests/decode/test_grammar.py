"""Structured output: what compiles, what is refused before any work, and that replies keep to it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest

import perdure
from counting import calls_of
from decode.observed import check_delivery, outcome, read, trouble
from perdure import Grammar, GrammarError, InvalidInputError, Model, Reply, Runtime, models
from perdure.decode.sampling.grammar import Grammars
from perdure.decode.sampling.matcher import Matcher
from perdure.testing.toy import ToyModel

SCHEMAS: dict[str, Any] = {
    "person": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 1, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    "choice": {"enum": ["yes", "no", 7, None, True]},
    "either": {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 10, "maximum": 99}]},
    "date": {"type": "string", "pattern": "^[0-9]{4}-[01][0-9]$"},
    "list": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": {"type": "integer", "minimum": 0, "maximum": 9},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "unicode": {"const": {"é": "한국 🙂", 'q"\\': "\n\t"}},
}

MALFORMED: list[tuple[str, Callable[[], Grammar]]] = [
    ("schema: not JSON", lambda: Grammar.json_schema("{")),
    ("schema: a list", lambda: Grammar.json_schema("[]")),
    ("schema: a number", lambda: Grammar.json_schema("7")),
    ("schema: not serialisable", lambda: Grammar.json_schema({"const": object()})),
    ("schema: unknown type", lambda: Grammar.json_schema({"type": "strin"})),
    ("schema: bad keyword value", lambda: Grammar.json_schema({"type": "string", "maxLength": "x"})),
    ("schema: not supported", lambda: Grammar.json_schema({"not": {"type": "string"}})),
    ("schema: bad pattern", lambda: Grammar.json_schema({"type": "string", "pattern": "(["})),
    ("schema: lookahead", lambda: Grammar.json_schema({"type": "string", "pattern": "(?=a)b"})),
    ("schema: missing definition", lambda: Grammar.json_schema({"$ref": "#/$defs/none"})),
    ("schema: elsewhere", lambda: Grammar.json_schema({"$ref": "http://localhost/x.json"})),
    ("schema: of itself", lambda: Grammar.json_schema({"$ref": "#"})),
    ("schema: false", lambda: Grammar.json_schema(False)),
    ("schema: empty range", lambda: Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 3})),
    ("schema: empty enum", lambda: Grammar.json_schema({"enum": []})),
    ("schema: too deep", lambda: Grammar.json_schema(nested(100))),
    ("schema: far too deep", lambda: Grammar.json_schema(nested(5000))),
    ("schema: a text too deep", lambda: Grammar.json_schema('{"items":' * 90_000 + "true" + "}" * 90_000)),
    ("schema: too many ways", lambda: Grammar.json_schema({"allOf": [either(at) for at in range(14)]})),
    ("regex: unclosed", lambda: Grammar.regex("(")),
    ("regex: lookahead", lambda: Grammar.regex("a(?=b)")),
    ("regex: backreference", lambda: Grammar.regex(r"(a)\1")),
    ("regex: too deep", lambda: Grammar.regex("(" * 90_000 + "a" + ")" * 90_000)),
    ("regex: a surrogate", lambda: Grammar.regex("\ud800")),
    ("regex: no text", lambda: Grammar("regex", 7)),  # type: ignore[arg-type]
    ("lark: no start", lambda: Grammar.lark('begin: "a"')),
    ("lark: nonsense", lambda: Grammar.lark("\x00\x01 ]]")),
    ("lark: unknown rule", lambda: Grammar.lark("start: other")),
    ("lark: endless", lambda: Grammar.lark("start: other\nother: start")),
    ("lark: too deep", lambda: Grammar.lark("start: " + "(" * 9_000 + '"a"' + ")" * 9_000)),
    ("lark: empty", lambda: Grammar.lark("")),
    ("gbnf: no root", lambda: Grammar.gbnf('other ::= "a"')),
    ("gbnf: unclosed", lambda: Grammar.gbnf('root ::= "a')),
    ("gbnf: unclosed set", lambda: Grammar.gbnf("root ::= [a-")),
    ("gbnf: bad escape", lambda: Grammar.gbnf('root ::= "\\q"')),
    ("gbnf: unknown rule", lambda: Grammar.gbnf("root ::= none")),
    ("gbnf: too deep", lambda: Grammar.gbnf("root ::= " + "(" * 90_000 + '"a"' + ")" * 90_000)),
    ("another kind", lambda: Grammar("llguidance", "{}")),  # type: ignore[arg-type]
]


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def either(at: int) -> dict[str, Any]:
    return {"anyOf": [{"required": [f"a{at}"]}, {"required": [f"b{at}"]}]}


@pytest.fixture(scope="module")
def model(zoo_path: Callable[[str], Path]) -> Iterator[Model]:
    with Model(zoo_path("llama")) as model:
        yield model


@pytest.fixture(scope="module")
def rt(model: Model) -> Iterator[Runtime]:
    with perdure.open(model, n_ctx=512, slots=2, threads=1) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def real() -> Iterator[Runtime]:
    with perdure.open(models.path(), n_ctx=512, slots=2, threads=1) as runtime:
        yield runtime


def check_json(reply: Reply, schema: Any) -> None:
    """Whole and valid where it says so; the start of something valid where it was cut."""
    if reply.finish_reason == "stop":
        jsonschema.validate(json.loads(reply.text), schema)
    else:
        assert reply.finish_reason == "length"


# What is refused, and when.


@pytest.mark.parametrize("make", [make for _, make in MALFORMED], ids=[name for name, _ in MALFORMED])
def test_a_malformed_grammar_is_a_typed_error_before_any_decoding(make: Callable[[], Grammar]) -> None:
    with perdure.open(ToyModel(), n_ctx=64, slots=1) as rt:
        with pytest.raises(GrammarError) as caught:
            rt.submit("a", grammar=make())
        assert len(str(caught.value)) < 1000
        assert trouble(rt).n_decodes == 0
        assert rt.load == (0, 0)
        assert rt.generate("a", regex="ok").text == "ok"


def test_only_one_of_grammar_schema_and_regex_can_be_given(rt: Runtime) -> None:
    with pytest.raises(InvalidInputError, match="give one"):
        rt.submit("a", regex="a", schema={"type": "string"})
    with pytest.raises(InvalidInputError, match="Grammar"):
        rt.submit("a", grammar="a+")  # type: ignore[arg-type]


# Compiled once.


def test_a_grammar_is_compiled_once_and_shared_by_all_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        calls_of(monkeypatch, (llguidance, "grammar_from")) as compiled,
        perdure.open(ToyModel(), n_ctx=64, slots=2) as rt,
    ):
        schema = SCHEMAS["person"]
        jobs = [rt.submit("a", schema=schema, max_tokens=5) for _ in range(3)]
        jobs += [rt.submit("a", schema=json.dumps(schema, indent=2), n=3, max_tokens=5)]
        jobs += [rt.submit("a", grammar=Grammar.json_schema(schema), max_tokens=5)]
        for job in jobs:
            job.replies()
        assert compiled.count == 1
        rt.generate("a", regex="b")
        assert compiled.count == 2


def test_a_grammar_asked_for_by_many_threads_at_once_is_compiled_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammars = Grammars(ToyModel())
    found: list[Matcher] = []
    start = threading.Barrier(6)

    def ask() -> None:
        start.wait()
        found.append(grammars.matcher(Grammar.regex("[a-z]{3,5}")))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    with calls_of(monkeypatch, (llguidance, "grammar_from")) as compiled:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (compiled.count, len(found)) == (1, 6)


def test_replies_with_one_grammar_do_not_disturb_each_other() -> None:
    grammars = Grammars(ToyModel())
    one, other = (grammars.matcher(Grammar.regex("ab|cd")) for _ in range(2))
    one.consume(ord("a"))
    assert allowed(one) == {"b"}
    assert allowed(other) == {"a", "c"}
    other.consume(ord("c"))
    assert allowed(one) == {"b"}


def allowed(matcher: Matcher) -> set[str]:
    return {chr(token) for token in np.flatnonzero(np.unpackbits(matcher.mask(), bitorder="little"))}


# Replies keep to it.


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("settings", [{"temperature": 0}, {"seed": 1}, {"seed": 2, "temperature": 2.0}])
def test_every_reply_that_stopped_parses_and_validates(
    name: str, settings: Mapping[str, Any], rt: Runtime
) -> None:
    schema = SCHEMAS[name]
    reply = rt.generate("Give me:", schema=schema, max_tokens=120, **settings)
    check_json(reply, schema)
    if name != "list":
        assert reply.finish_reason == "stop"


def test_white_space_comes_in_measure_unless_the_schema_says_otherwise(rt: Runtime) -> None:
    """A model of random weights gets lost in white space at once where it may."""
    schema = SCHEMAS["person"]
    for seed in range(6):
        reply = rt.generate("Give me:", schema=schema, max_tokens=200, seed=seed, temperature=1.5)
        assert reply.finish_reason == "stop"
        check_json(reply, schema)
    tight = {**schema, "x-guidance": {"whitespace_flexible": False}}
    reply = rt.generate("Give me:", schema=tight, max_tokens=200, seed=1)
    assert reply.text == json.dumps(json.loads(reply.text), separators=(",", ":"), ensure_ascii=False)
    loose = {**schema, "x-guidance": {"whitespace_flexible": True}}
    assert rt.generate("Give me:", schema=loose, max_tokens=200, seed=1).finish_reason == "length"


@pytest.mark.parametrize(
    "style", [{}, {"indent": 2}, {"indent": 4}, {"indent": "\t"}, {"separators": (",", ":")}]
)
def test_every_usual_style_of_json_may_be_written(style: Mapping[str, Any]) -> None:
    model = ToyModel()
    value = {"name": "Ada", "age": 36, "tags": ["a", "b"]}
    matcher = Grammars(model).matcher(Grammar.json_schema(SCHEMAS["person"]))
    for byte in json.dumps(value, **style).encode():
        matcher.mask()
        matcher.consume(byte)
    assert matcher.complete


def test_a_reply_without_its_mask_would_not_validate(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check has teeth: with the mask taken away the engine says something else."""
    everything = np.full(48, 255, np.uint8)
    monkeypatch.setattr(Matcher, "mask", lambda self: everything)
    with pytest.raises(GrammarError, match="refused token"):
        rt.generate("Give me:", schema=SCHEMAS["person"], max_tokens=120, temperature=0)


@pytest.mark.parametrize(
    "pattern", ["[a-f]{8}", "(yes|no)", r"[0-9]{1,3}(\.[0-9]{1,3}){3}", "é(한|국){2}🙂", "a|b|c", "x{40}"]
)
def test_a_regex_is_matched_in_full(pattern: str, rt: Runtime) -> None:
    for seed in range(3):
        reply = rt.generate("Say", regex=pattern, max_tokens=90, seed=seed)
        assert reply.finish_reason == "stop"
        assert re.fullmatch(pattern, reply.text)


def test_a_lark_grammar_is_kept(rt: Runtime) -> None:
    grammar = Grammar.lark('start: sum\nsum: number ("+" number)~2\nnumber: /[1-9][0-9]?/')
    reply = rt.generate("1+1=", grammar=grammar, max_tokens=40, seed=3)
    assert reply.finish_reason == "stop"
    assert re.fullmatch(r"[1-9]\d?\+[1-9]\d?\+[1-9]\d?", reply.text)


def test_a_gbnf_grammar_is_kept(rt: Runtime) -> None:
    grammar = Grammar.gbnf('root ::= "<" word ("," word)? ">"\nword ::= [a-z] [a-z] [a-z]')
    reply = rt.generate("Words", grammar=grammar, max_tokens=40, seed=4)
    assert reply.finish_reason == "stop"
    assert re.fullmatch("<[a-z]{3}(,[a-z]{3})?>", reply.text)


def test_the_mask_works_with_greedy_mirostat_penalties_and_bias(rt: Runtime) -> None:
    for settings in (
        {"temperature": 0},
        {"mirostat": 1},
        {"mirostat": 2},
        {"repeat_penalty": 1.5, "frequency_penalty": 2.0},
        {"dry_multiplier": 1e6, "dry_base": 1e6, "temperature": 1e-6},
        {"xtc_probability": 1.0, "xtc_threshold": 0.0},
        {"typical_p": 0.0},
        {"logit_bias": {ord("a"): -1e6, ord("z"): 1e6}},
        {"top_k": 1, "min_p": 1.0},
    ):
        reply = rt.generate("Say", regex="[ab]{30}", max_tokens=60, seed=1, **settings)
        assert reply.finish_reason == "stop", settings
        assert re.fullmatch("[ab]{30}", reply.text)


def test_a_reply_under_a_grammar_can_still_end_by_length_and_by_a_stop_string(rt: Runtime) -> None:
    cut = rt.generate("Say", regex="[ab]{30}", max_tokens=4, seed=1)
    assert (cut.finish_reason, len(cut.tokens)) == ("length", 4)
    stopped = rt.generate("Say", regex="ab{30}c", max_tokens=60, stop="bbb", seed=1)
    assert (stopped.finish_reason, stopped.text, stopped.stop) == ("stop", "a", "bbb")


def test_a_grammar_that_may_end_or_go_on_is_ended_by_the_model(rt: Runtime, model: Model) -> None:
    """The end token is allowed where the grammar may end, and ends the reply."""
    end = model.eos
    assert end is not None
    reply = rt.generate("Say", regex="a+", max_tokens=50, temperature=0, logit_bias={end: 100.0})
    assert (reply.text, reply.finish_reason, reply.end) == ("a", "stop", end)
    on = rt.generate("Say", regex="a+", max_tokens=9, temperature=0, ignore_eos=True)
    assert (on.text, on.finish_reason) == ("a" * len(on.text), "length")


def test_samples_of_one_prompt_each_keep_to_the_grammar(rt: Runtime) -> None:
    replies = rt.submit("Say", regex="[a-z]{6}", n=5, seed=1, temperature=3.0, max_tokens=20).replies()
    assert all(re.fullmatch("[a-z]{6}", reply.text) for reply in replies)
    assert len({reply.text for reply in replies}) > 1


# Dead ends.


def test_a_dead_end_is_reported_with_what_came_before_it_and_not_looped_on(rt: Runtime) -> None:
    """The letter b is ruled out, and after two letters a nothing else may follow."""
    ways: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 1}, {"mirostat": 2}]
    for settings in ways:
        job = rt.submit("Say", regex="aab", max_tokens=50, logit_bias=without("b", rt.model), **settings)
        seen = read(job)
        assert isinstance(seen.error, GrammarError)
        assert "dead end" in str(seen.error)
        assert seen.reasons == ["error"]
        assert seen.text in ("aa", "a", "")
    assert rt.generate("Say", regex="aab", max_tokens=50).text == "aab"


def without(letter: str, model: Any) -> dict[int, float]:
    return {token: -float("inf") for token in range(model.n_vocab) if letter.encode() in model.piece(token)}


def test_a_vocabulary_that_cannot_write_the_grammar_is_a_dead_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without a token for a letter: the mask itself comes out empty."""
    toy = ToyModel()
    piece = ToyModel.piece

    def poor(self: ToyModel, token: int, *, special: bool = False) -> bytes:
        return b"?" if token == ord("b") else piece(self, token, special=special)

    def tokenize(self: ToyModel, text: str, *, special: bool = False, bos: bool = True) -> list[int]:
        return [byte for byte in text.encode() if byte != ord("b")]

    monkeypatch.setattr(ToyModel, "piece", poor)
    monkeypatch.setattr(ToyModel, "tokenize", tokenize)
    with perdure.open(toy, n_ctx=64, slots=1) as rt:
        job = rt.submit("x", regex="ab", max_tokens=20)
        with pytest.raises(GrammarError, match="dead end"):
            job.reply()
        with pytest.raises(GrammarError, match="no reply at all"):
            rt.submit("x", regex="b")


def test_a_dead_end_of_one_sample_leaves_its_siblings_alone(rt: Runtime) -> None:
    """Samples that begin with a come to a dead end; those that begin with c do not."""
    job = rt.submit(
        "Say", regex="ab|cd", n=8, seed=1, temperature=50.0, max_tokens=9, logit_bias=without("b", rt.model)
    )
    seen = read(job)
    assert isinstance(seen.error, GrammarError)
    check_delivery(seen.deltas, outcome(job), rt.model)
    assert {reply.finish_reason for reply in outcome(job)} == {"stop", "error"}
    assert all(reply.text == "cd" for reply in outcome(job) if reply.finish_reason == "stop")


# Hostile, but legal.

HOSTILE: dict[str, Grammar] = {
    "a regex of a million": Grammar.regex("(a{1000}){1000}"),
    "an automaton that doubles": Grammar.regex("(a|b)*c(a|b){20}"),
    "a deep schema": Grammar.json_schema(nested(30)),
    "a long string": Grammar.json_schema({"type": "string", "minLength": 10**9}),
    "a long array": Grammar.json_schema({"type": "array", "minItems": 10**5}),
    "ten thousand words": Grammar.json_schema({"enum": [f"w{at}" for at in range(10_000)]}),
    "left recursion": Grammar.lark('start: start "a" | "b"'),
    "an ambiguous one": Grammar.lark('start: start start | "a"'),
    "anything": Grammar.json_schema(True),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_ends_in_a_reply_or_a_typed_error(name: str, rt: Runtime) -> None:
    try:
        reply = rt.generate("Say", grammar=HOSTILE[name], max_tokens=40, seed=1)
    except GrammarError:
        pass
    else:
        assert reply.finish_reason in ("stop", "length")
    assert rt.generate("Say", regex="ok").text == "ok"


# The real model.


@pytest.mark.model
def test_the_real_model_keeps_to_schemas_and_regexes(real: Runtime) -> None:
    for name, schema in SCHEMAS.items():
        reply = real.generate("A JSON object:\n", schema=schema, max_tokens=60, temperature=0)
        check_json(reply, schema)
        assert reply.finish_reason == "stop" or name == "list"
    answer = real.generate("Is the sky blue? Answer:", regex="(yes|no)", temperature=0)
    assert answer.text in ("yes", "no")
    word = real.generate("한국", regex="[가-힣]{3}", max_tokens=20, temperature=0)
    assert re.fullmatch("[가-힣]{3}", word.text)


@pytest.mark.model
@pytest.mark.soak
def test_two_hundred_replies_of_the_real_model_validate(real: Runtime) -> None:
    stopped = 0
    for seed in range(200):
        name = list(SCHEMAS)[seed % len(SCHEMAS)]
        reply = real.generate("JSON:\n", schema=SCHEMAS[name], max_tokens=80, seed=seed, temperature=1.0)
        check_json(reply, SCHEMAS[name])
        stopped += reply.finish_reason == "stop"
    print(f"{stopped} of 200 replies came to an end of their own, all of them valid")
    assert stopped >= 150
