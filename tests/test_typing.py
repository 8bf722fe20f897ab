"""Typed calls: every option has a name and a type, so that a misspelt one is found before it runs."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import perdure
from perdure import InvalidInputError, Sampling
from perdure.chat.keywords import ChatKeywords
from perdure.chat.options import ChatOptions
from perdure.decode.keywords import RequestKeywords, SamplingKeywords
from perdure.decode.request import Request
from perdure.engine.toy import ToyModel

RIGHT = """
import perdure

def main(rt: perdure.Runtime) -> None:
    rt.generate("a", max_tokens=3, temperature=0.5, stop="x")
    rt.chat([{"role": "user", "content": "a"}], reasoning="hide", max_tokens=3)
    rt.session("alice", overflow="shift", temperature=0)
    perdure.open("model.gguf", n_ctx=64, threads=1, gpu_layers="auto")
"""
WRONG = {
    'rt.generate("a", max_token=3)': "max_token",
    'rt.submit("a", temprature=1.0)': "temprature",
    'rt.stream("a", temperature="hot")': "temperature",
    'rt.chat([], reasoning="loud")': "reasoning",
    'rt.submit_chat([], tool_chioce="auto")': "tool_chioce",
    'rt.session("alice", overflw="shift")': "overflw",
    'perdure.open("m.gguf", n_cxt=64)': "open",
}


def test_mypy_finds_each_misspelt_or_mistyped_option_and_nothing_else(tmp_path: Path) -> None:
    lines = RIGHT.rstrip().split("\n")
    first = len(lines) + 1
    file = tmp_path / "calls.py"
    file.write_text("\n".join([*lines, *(f"    {call}" for call in WRONG)]) + "\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", str(tmp_path)]
    found = subprocess.run([*command, str(file)], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    errors = {int(line.split(":")[1]): line for line in found.stdout.splitlines() if ": error:" in line}
    assert sorted(errors) == list(range(first, first + len(WRONG))), found.stdout + found.stderr
    for line, name in zip(sorted(errors), WRONG.values(), strict=True):
        assert name in errors[line]


def test_the_keywords_are_the_fields() -> None:
    assert set(SamplingKeywords.__annotations__) == set(Sampling.__dataclass_fields__)
    asked = set(RequestKeywords.__annotations__) - set(SamplingKeywords.__annotations__)
    assert asked == set(Request.__dataclass_fields__) - {"prompt", "stops"} | {"stop", "schema", "regex"}
    chatted = set(ChatKeywords.__annotations__) - set(RequestKeywords.__annotations__)
    assert chatted == set(ChatOptions.__dataclass_fields__)


@pytest.mark.parametrize(
    ("name", "meant"), [("n_cxt", "n_ctx"), ("gpu_layer", "gpu_layers"), ("slot", "slots")]
)
def test_open_refuses_a_setting_that_it_does_not_know_and_suggests_one(name: str, meant: str) -> None:
    with pytest.raises(InvalidInputError, match=f"no option '{name}'; did you mean '{meant}'"):
        perdure.open(ToyModel(), **{name: 1})  # type: ignore[arg-type]


def test_every_call_of_a_runtime_that_waits_has_a_twin_for_asyncio() -> None:
    for name in ("generate", "stream", "chat", "chat_stream", "session", "score", "embed", "close"):
        plain, twin = getattr(perdure.Runtime, name), getattr(perdure.Runtime, f"a{name}")
        assert list(inspect.signature(plain).parameters) == list(inspect.signature(twin).parameters)
