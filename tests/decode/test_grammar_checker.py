"""Grammars that kill or hold the process that compiles them cost a child process, and nobody else."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import llguidance
import pytest

import perdure
from counting import calls_of
from decode.observed import trouble
from perdure import Grammar, GrammarError, Runtime
from perdure.decode.sampling import grammar_checker
from perdure.decode.sampling.grammar import Grammars
from perdure.testing.toy import ToyModel

# Without `Grammar.json_schema`, which refuses its numbers.
DEADLY = Grammar("json_schema", '{"type":"integer","minimum":-1e31,"maximum":-1e30}')
NUMBER = 999_983
"""A multiple of it takes 8 s to compile, or 2 s to be refused."""


def slow(number: int = NUMBER) -> Grammar:
    return Grammar.json_schema({"type": "integer", "multipleOf": number})


def refused(grammars: Grammars, grammar: Grammar, namespace: str = "") -> str:
    with pytest.raises(GrammarError) as caught:
        grammars.matcher(grammar, namespace)
    return str(caught.value)


def refusal(rt: Runtime, grammar: Grammar) -> str:
    with pytest.raises(GrammarError) as caught:
        rt.submit("a", grammar=grammar)
    return str(caught.value)


def test_a_schema_that_ends_the_process_that_compiles_it_is_an_error_y25() -> None:
    """Y25: in a separate program, which lives on, whatever way the schema comes in."""
    program = """
import perdure
from perdure.testing.toy import ToyModel
text = '{"type": "integer", "minimum": -1e31, "maximum": -1e30}'
with perdure.open(ToyModel(), n_ctx=64, slots=1) as rt:
    for settings in ({"schema": text}, {"grammar": perdure.Grammar("json_schema", text)}) * 2:
        try:
            rt.submit("a", **settings)
        except perdure.GrammarError as error:
            print(error)
    print(rt.generate("a", regex="ok").text)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    bounds, death, *_, last = done.stdout.splitlines()
    assert "64 bits" in bounds
    assert "SIGSEGV" in death
    assert last == "ok"


def test_a_grammar_that_killed_a_child_kills_none_again_y25(monkeypatch: pytest.MonkeyPatch) -> None:
    """Y25: remembered by its digest. A first death may have been an accident, so there are two."""
    grammars = Grammars(ToyModel())
    with calls_of(monkeypatch, (grammar_checker, "reap")) as deaths:
        words = refused(grammars, DEADLY)
        assert "ends the process" in words
        assert deaths.count == 2
        assert refused(grammars, DEADLY) == words
        assert deaths.count == 2
    grammars.matcher(Grammar.regex("a+"))


def test_a_child_that_somebody_else_killed_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(ToyModel())
    grammars.matcher(Grammar.regex("a"))
    started = grammar_checker.start_child

    def start_and_kill() -> subprocess.Popen[bytes]:
        monkeypatch.setattr(grammar_checker, "start_child", started)
        child = started()
        os.kill(child.pid, signal.SIGKILL)
        return child

    grammar_checker.checker.close()
    monkeypatch.setattr(grammar_checker, "start_child", start_and_kill)
    grammars.matcher(Grammar.regex("b"))


def test_what_was_refused_is_remembered_y26(monkeypatch: pytest.MonkeyPatch) -> None:
    """Y26: neither compiled nor checked again."""
    grammars = Grammars(ToyModel())
    with calls_of(monkeypatch, (llguidance, "grammar_from")) as compiled:
        words = {refused(grammars, Grammar.regex("a(?=b)")) for _ in range(3)}
        assert (compiled.count, len(words)) == (1, 1)


def test_a_slow_grammar_holds_up_no_other_and_is_refused_y26(compiling: Compiling) -> None:
    """Y26: others are compiled while it is, and its time is limited."""
    grammars = Grammars(ToyModel())
    words = compiling(lambda: refused(grammars, slow()))
    others = 0
    while words.is_alive() and others < 10:
        grammars.matcher(Grammar.regex(f"other {others}"))
        others += 1
    assert others == 10
    assert "more than 2 s" in words.result()
    assert "more than 2 s" in refused(grammars, slow())


def test_a_deadline_ends_the_compiling_of_a_grammar_y26(compiling: Compiling) -> None:
    """Y26: as it ends all else: as cancelled, before anything is computed."""
    with perdure.open(ToyModel(), n_ctx=64, slots=1) as rt:
        held = compiling(lambda: refusal(rt, slow()))
        reply = rt.generate("a", grammar=slow(999_979), timeout=0.05)
        assert held.is_alive()
        assert (reply.finish_reason, reply.text) == ("cancelled", "")
        assert trouble(rt).n_decodes == 0
        held.result()
        assert rt.generate("a", regex="ok").text == "ok"


def test_a_reply_whose_grammar_came_too_late_says_nothing_y26(monkeypatch: pytest.MonkeyPatch) -> None:
    """Y26: also where its deadline is not seen to have passed: without the grammar it may say anything."""

    def late(*arguments: object) -> None:
        raise grammar_checker.GrammarLate

    monkeypatch.setattr(Grammars, "matcher", late)
    with perdure.open(ToyModel(), n_ctx=64, slots=1) as rt:
        reply = rt.generate("a", regex="[a-z]", n=1, timeout=100)
        assert (reply.finish_reason, reply.text) == ("cancelled", "")
        assert trouble(rt).n_decodes == 0


def test_a_namespace_that_compiles_many_slow_grammars_leaves_room_for_others_y26(
    compiling: Compiling,
) -> None:
    """Y26: a share for each, also of what is remembered."""
    grammars = Grammars(ToyModel())
    primes = (999_983, 999_979)
    held = [compiling(functools.partial(refused, grammars, slow(prime), "a")) for prime in primes]
    grammars.matcher(Grammar.regex("b's"), "b")
    assert any(each.is_alive() for each in held)
    for each in held:
        each.result()


def test_a_namespace_of_many_grammars_does_not_evict_those_of_others_y26(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammars = Grammars(ToyModel())
    grammars.matcher(Grammar.regex("b's"), "b")
    for at in range(300):
        grammars.matcher(Grammar.regex(f"a's {at}"), "a")
    with calls_of(monkeypatch, (llguidance, "grammar_from")) as compiled:
        grammars.matcher(Grammar.regex("b's"), "b")
        grammars.matcher(Grammar.regex("a's 299"), "a")
        assert compiled.count == 0
        grammars.matcher(Grammar.regex("a's 0"), "a")
        assert compiled.count == 1


def test_a_namespace_cannot_time_what_another_one_has_compiled_y26(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each compiles what it asks for, and is refused by work of its own request."""
    grammars = Grammars(ToyModel())
    with calls_of(monkeypatch, (llguidance, "grammar_from")) as compiled:
        for at, namespace in enumerate(["a", "b", "c"], 1):
            for _ in range(2):
                grammars.matcher(Grammar.regex("secret project"), namespace)
                refused(grammars, Grammar.regex("a(?=b)"), namespace)
            assert compiled.count == 2 * at


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 10**19, "maximum": 10**20},
        {"type": "integer", "maximum": -(10**20)},
        {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1},
        {"type": ["integer", "null"], "exclusiveMinimum": 1e19},
        {"allOf": [{"type": "integer"}, {"minimum": 10**400}]},
        {"type": "object", "properties": {"const": {"minimum": 10**19}}},
        {"const": 2**53 + 1},
        {"enum": [1, {"a": [-(2**63) - 1]}]},
    ],
    ids=str,
)
def test_numbers_that_a_reply_cannot_be_held_to_are_refused_y27(schema: dict[str, Any]) -> None:
    """Y27: rounded or cut to 64 bits, they allow replies that break the schema."""
    with pytest.raises(GrammarError, match="64 bits"):
        Grammar.json_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
        {"type": "integer", "minimum": -(2**53), "maximum": 2**53},
        {"const": 2**62},
        {"const": {"minimum": 1e19}},
        {"type": "object", "properties": {"minimum": {"enum": [1]}}, "required": ["minimum"]},
    ],
    ids=str,
)
def test_other_numbers_are_kept_to_y27(schema: dict[str, Any]) -> None:
    import jsonschema

    with perdure.open(ToyModel(), n_ctx=256, slots=1) as rt:
        for seed in range(5):
            reply = rt.generate("a", schema=schema, seed=seed, temperature=3.0, max_tokens=100)
            if reply.finish_reason == "stop":
                jsonschema.validate(json.loads(reply.text), schema)


# A fuzzer: whatever is drawn, this process lives, and the outcome is a matcher or a typed error.


def drawn_schema(draw: random.Random, depth: int = 3) -> Any:
    numbers = [0, 1, -1, 0.5, 7, 1e15, -1e18, 2**62, -(2**62), 2**53, 1e-9, -1e-300, 10**17 + 1]
    kind = draw.choice(["integer", "number", "string", "array", "object", "enum", "anyOf", "allOf", "ref"])
    if kind in ("integer", "number"):
        names = draw.sample(
            ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"], draw.randint(0, 3)
        )
        return {"type": kind} | {name: draw.choice(numbers) for name in names}
    if kind == "string":
        return draw.choice(
            [
                {
                    "type": "string",
                    "minLength": draw.choice([0, 5, 10**6]),
                    "maxLength": draw.choice([3, 10**9]),
                },
                {"type": "string", "pattern": drawn_regex(draw)},
                {"type": "string", "format": draw.choice(["date-time", "uuid", "email", "uri", "none"])},
            ]
        )
    if kind == "enum":
        return {
            "enum": [draw.choice(["a", 1, None, -1.5, 2**63, {"a": []}]) for _ in range(draw.randint(0, 4))]
        }
    if depth == 0 or kind == "ref":
        return {"$ref": draw.choice(["#", "#/properties/a", "#/$defs/x", "#/items"])}
    inner = [drawn_schema(draw, depth - 1) for _ in range(draw.randint(0, 3))]
    if kind in ("anyOf", "allOf"):
        return {kind: inner}
    if kind == "array":
        return {
            "type": "array",
            "items": inner[0] if inner else True,
            "prefixItems": inner[1:],
            "minItems": draw.choice([0, 2, 10**6]),
            "maxItems": draw.choice([1, 10, 10**12]),
        }
    names = [draw.choice(["a", "b", "\u0000", "x" * 50]) for _ in inner]
    return {
        "type": "object",
        "properties": dict(zip(names, inner, strict=True)),
        "required": draw.sample(names, draw.randint(0, len(names))),
        "additionalProperties": draw.choice([True, False, {"type": "integer"}]),
        "minProperties": draw.choice([0, 1, 100]),
    }


def drawn_regex(draw: random.Random, depth: int = 2) -> str:
    parts = ["a", "b", ".", "[^a]", r"\d", r"\p{L}", "(?i:x)", "한", "[a-z]", "(?s:.)", "^", "[z-a]", ")"]
    counts = ["", "", "", "*", "+", "?", "{3}", "{2,}", "{1000}", "{0,99999}", "{5,2}"]
    weights = [9] * 10 + [1] * 3

    def part() -> str:
        if depth and not draw.randrange(3):
            return f"({drawn_regex(draw, depth - 1)}|{drawn_regex(draw, depth - 1)})"
        return draw.choices(parts, weights)[0]

    return "".join(part() + draw.choice(counts) for _ in range(draw.randint(1, 6)))


def drawn_rules(draw: random.Random, kind: str) -> str:
    is_lark = kind == "lark"
    names = ["start" if is_lark else "root", "a", "b", "c"]
    items = [*names[1:], '"x"', '"\\n"', '"ab"', f"/{drawn_regex(draw)}/" if is_lark else "[a-z]"]
    items += ["<[7]>", "%json {}", names[0]] if is_lark else ['""', names[0]]
    counts = ["", "", "*", "+", "?"] + (["~3", "~1..9999"] if is_lark else ["{3}", "{1,9999}"])

    def alternative(depth: int) -> str:
        if depth and not draw.randrange(3):
            return f"({alternative(depth - 1)} | {alternative(depth - 1)})"
        return " ".join(draw.choice(items) + draw.choice(counts) for _ in range(draw.randint(1, 4)))

    sign = ":" if is_lark else "::="
    return "\n".join(f"{name} {sign} {alternative(3)}" for name in names)


DRAWN: dict[str, Callable[[random.Random], Grammar]] = {
    "json_schema": lambda draw: Grammar("json_schema", json.dumps(drawn_schema(draw))),
    "regex": lambda draw: Grammar.regex(drawn_regex(draw)),
    "lark": lambda draw: Grammar.lark(drawn_rules(draw, "lark")),
    "gbnf": lambda draw: Grammar.gbnf(drawn_rules(draw, "gbnf")),
}


def fuzz(kind: str, seeds: range) -> dict[str, int]:
    """How many of them compile, are refused, and are so since a child died of them."""
    grammars = Grammars(ToyModel())
    counts = {"compiled": 0, "refused": 0, "deaths": 0, "slow": 0}
    for seed in seeds:
        try:
            matcher = grammars.matcher(DRAWN[kind](random.Random(seed)))
        except GrammarError as error:
            words = str(error)
            died, late = "ends the process" in words, "takes more than" in words
            counts["deaths" if died else "slow" if late else "refused"] += 1
        else:
            counts["compiled"] += 1
            matcher.mask()
    assert sum(counts.values()) == len(seeds)
    print(f"{kind}: {counts}")
    return counts


@pytest.mark.parametrize("kind", DRAWN)
def test_no_drawn_grammar_ends_this_process(kind: str) -> None:
    """Class 8."""
    assert fuzz(kind, range(150))["compiled"]


@pytest.mark.soak
@pytest.mark.parametrize("kind", DRAWN)
def test_no_drawn_grammar_ends_this_process_for_long(kind: str) -> None:
    assert fuzz(kind, range(150, 20_000))["compiled"]


class Job(threading.Thread):
    """A call in a thread, and what it gave."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.start()

    def run(self) -> None:
        self._result = self._call()

    def result(self) -> Any:
        self.join()
        return self._result


Compiling = Callable[[Callable[[], Any]], Job]


@pytest.fixture
def compiling() -> Iterator[Compiling]:
    """Starts a call in a thread; each is waited for at the end."""
    jobs: list[Job] = []

    def start(call: Callable[[], Any]) -> Job:
        jobs.append(Job(call))
        return jobs[-1]

    yield start
    for job in jobs:
        job.join()
