"""Typed calls: every option has a name and a type, so that a misspelt one is found before it runs."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import perdure
from perdure import InvalidInputError, Sampling
from perdure.chat.options import ChatKeywords, ChatOptions
from perdure.decode.request import Request, RequestKeywords, SamplingKeywords
from perdure.testing.toy import ToyModel

ROOT = Path(__file__).parent.parent
RIGHT = """
import perdure
from perdure.cache.prefix_cache import PrefixCacheCalls
from perdure.ext.workers.protocol import Ask

def main(rt: perdure.Runtime) -> None:
    rt.generate("a", max_tokens=3, temperature=0.5, stop="x")
    rt.chat([{"role": "user", "content": "a"}], reasoning="hide", max_tokens=3)
    rt.session("alice", overflow="shift", temperature=0)
    perdure.open("model.gguf", n_ctx=64, threads=1, gpu_layers="auto")

async def twins(s: perdure.Session) -> None:
    s.say("a", max_tokens=3, keep_partial=True, overflow="fold")
    await s.aedit(1, "a", temperature=0.5)
    await s.aregenerate(seed=7)
    await s.afold(keep=1, max_tokens=64)

async def wrong(rt: perdure.Runtime, s: perdure.Session, ask: Ask) -> None:
"""
WRONG = {
    'ask("cache", PrefixCacheCalls.plan, [1], namespce="a")': "namespce",
    'ask("cache", PrefixCacheCalls.warm, 1.5)': 'expected "str | Iterable[int]"',
    'rt.generate("a", max_token=3)': "max_token",
    'rt.submit("a", temprature=1.0)': "temprature",
    'rt.stream("a", temperature="hot")': "temperature",
    'rt.chat([], reasoning="loud")': "reasoning",
    'rt.submit_chat([], tool_chioce="auto")': "tool_chioce",
    'rt.session("alice", overflw="shift")': "overflw",
    'perdure.open("m.gguf", n_cxt=64)': "open",
    's.say("a", max_token=3)': "max_token",
    's.stream("a", temprature=1.0)': "temprature",
    's.submit("a", keep_partail=True)': "keep_partail",
    's.edit(1, "a", reasonning="hide")': "reasonning",
    's.submit_edit(1, "a", sead=3)': "sead",
    "s.regenerate(top_pp=0.5)": "top_pp",
    's.submit_regenerate(stopp="x")': "stopp",
    's.fold("b", summery="x")': "summery",
    'await s.asay("a", max_token=3)': "max_token",
    's.astream("a", seed="x")': "seed",
    'await s.aedit(1, "a", grammer=None)': "grammer",
    "await s.aregenerate(tols=[])": "tols",
    "await s.afold(kep=1)": "kep",
    'await rt.asession("alice", overflw="shift")': "overflw",
    "await rt.achat([], max_token=3)": "max_token",
}


def test_mypy_finds_each_misspelt_or_mistyped_option_and_nothing_else(tmp_path: Path) -> None:
    lines = RIGHT.rstrip().split("\n")
    first = len(lines) + 1
    file = tmp_path / "calls.py"
    file.write_text("\n".join([*lines, *(f"    {call}" for call in WRONG)]) + "\n")
    # Strict as this tree itself is checked, with what that found out: only the calls are looked at.
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(file)]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    errors = {int(line.split(":")[1]): line for line in found.stdout.splitlines() if ": error:" in line}
    assert sorted(errors) == list(range(first, first + len(WRONG))), found.stdout + found.stderr
    for line, name in zip(sorted(errors), WRONG.values(), strict=True):
        assert name in errors[line]


def test_the_keywords_are_the_fields() -> None:
    assert set(SamplingKeywords.__annotations__) == set(Sampling.__dataclass_fields__)
    asked = set(RequestKeywords.__annotations__) - set(SamplingKeywords.__annotations__)
    own = {"prompt", "stops", "reply_prefix", "emitted", "continued", "idle", "event_id", "resumed", "weight"}
    assert asked == set(Request.__dataclass_fields__) - own | {"stop", "schema", "regex"}
    chatted = set(ChatKeywords.__annotations__) - set(RequestKeywords.__annotations__)
    assert chatted == set(ChatOptions.__dataclass_fields__) | {"chat_template_kwargs"}


@pytest.mark.parametrize(
    ("name", "meant"), [("n_cxt", "n_ctx"), ("gpu_layer", "gpu_layers"), ("slot", "slots")]
)
def test_open_refuses_a_setting_that_it_does_not_know_and_suggests_one(name: str, meant: str) -> None:
    with pytest.raises(InvalidInputError, match=f"no option '{name}'; did you mean '{meant}'"):
        perdure.open(ToyModel(), **{name: 1})  # type: ignore[arg-type]


def test_every_call_of_a_session_that_waits_has_a_twin_for_asyncio() -> None:
    moves = ("fork", "rewind", "label", "fold", "delete", "sleep", "plan_wake", "wake", "export")
    for name in ("say", "stream", "edit", "regenerate", *moves):
        plain, twin = getattr(perdure.Session, name), getattr(perdure.Session, f"a{name}")
        assert list(inspect.signature(plain).parameters) == list(inspect.signature(twin).parameters)


def test_no_public_call_takes_keywords_without_names() -> None:
    """What an editor cannot complete, a type checker cannot check."""
    for name in perdure.__all__:
        kind = getattr(perdure, name)
        calls = [kind, *(vars(kind).values() if inspect.isclass(kind) else ())]
        for call in filter(inspect.isfunction, calls):
            if call.__name__.startswith("_"):
                continue
            for each in inspect.signature(call).parameters.values():
                if each.kind is each.VAR_KEYWORD and (name, call.__name__) not in FREE:
                    assert each.annotation.startswith(("Unpack[", "Never")), f"{name}.{call.__name__}"


FREE = {("Template", "render")}
"""A template's own variables can have any name."""


def test_every_call_of_a_runtime_that_waits_has_a_twin_for_asyncio() -> None:
    for name in ("generate", "stream", "chat", "chat_stream", "session", "score", "embed", "close"):
        plain, twin = getattr(perdure.Runtime, name), getattr(perdure.Runtime, f"a{name}")
        assert list(inspect.signature(plain).parameters) == list(inspect.signature(twin).parameters)


ANY_NAMES = {
    "cli/options/groups.py": "options by the names of a command's own, which typer has checked",
    "chat/template/template.py": "a template's own variables",
    "chat/template/sizes.py": "what a template gives to a filter, before the filter itself checks it",
    "chat/template/sandbox.py": "what a template gives to any call, as Jinja hands it on",
    "engine/logits.py": "NumPy's protocol",
    "ext/mlx/weights.py": "what mlx-lm gives to its own models, which is handed on",
}
"""Where keywords of any name are taken, and why."""


def test_hardly_any_function_takes_keywords_without_names() -> None:
    """Within, too: `**more: Any` only where the names are somebody else's."""
    source = Path(perdure.__file__).parent
    for file in source.rglob("*.py"):
        place = file.relative_to(source).as_posix()
        if place.startswith(tuple(ANY_NAMES)):
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.args.kwarg is not None:
                note = node.args.kwarg.annotation
                assert note is not None
                assert ast.unparse(note) != "Any", f"{place}: {node.name}"
