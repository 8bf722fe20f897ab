"""Adapters of a runtime, a session and a turn: in this process, in a child, after a restart."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import InvalidInputError, ModelNotFoundError, StoreLockedError
from perdure.testing.toy import ToyModel
from subjects import Subject
from zoo.attention import INVOCATION

ASK: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
Find = Callable[[str], Subject]
Names = Callable[[str], Path]


@pytest.fixture(params=["toy-full", "llama"])
def files(request: pytest.FixtureRequest, find_subject: Find, zoo_path: Names) -> tuple[Any, str, str]:
    """A model and two adapters for it."""
    model = find_subject(request.param).model
    if isinstance(model, ToyModel):
        return model, "one.gguf", "two.gguf"
    return model, str(zoo_path("llama-lora")), str(zoo_path("llama-lora2"))


def test_a_runtime_has_adapters_and_a_request_others(files: tuple[Any, str, str]) -> None:
    model, one, two = files
    with perdure.open(model, n_ctx=256) as rt:
        plain = rt.generate("Once", **ASK).text
        expected = rt.generate("Once", adapters={one: 2.0}, **ASK).text
        assert rt.generate("Once", adapters={one: 0.0}, **ASK).text == plain
    with perdure.open(model, n_ctx=256, adapters={one: 2.0}, adapter_names={"second": two}) as rt:
        assert rt.generate("Once", **ASK).text == expected != plain
        assert rt.generate("Once", adapters={}, **ASK).text == plain
        second = rt.generate("Once", adapters={"second": 2.0}, **ASK)
        assert second.text == rt.generate("Once", adapters={two: 2.0}, **ASK).text != expected
        with pytest.raises(ModelNotFoundError, match="there are second"):
            rt.generate("Once", adapters={"third": 1.0}, **ASK)
        with pytest.raises(InvalidInputError):
            rt.generate("Once", adapters={one: float("inf")}, **ASK)


def test_a_file_means_the_same_in_every_folder(
    zoo_path: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(zoo_path("llama-lora"), tmp_path / "a.gguf")
    monkeypatch.chdir(tmp_path)
    with perdure.open(str(zoo_path("llama")), n_ctx=256, threads=1) as rt:
        expected = rt.session("one", adapters={"a.gguf": 1.0}).say("Hello", **ASK).text
        monkeypatch.chdir(tmp_path.parent)
        assert rt.session("one").say("Hello", **ASK).text
        assert (
            rt.session("two", adapters={str(tmp_path / "a.gguf"): 1.0}).say("Hello", **ASK).text == expected
        )


def test_s8_a_session_with_adapters_wakes_to_its_own_state(
    files: tuple[Any, str, str], tmp_path: Path
) -> None:
    """T1, S8: its state outlives the process under its own adapters, and serves nobody else."""
    model, one, _ = files
    settings: dict[str, Any] = {"n_ctx": 512, "store": tmp_path / "store"}
    with perdure.open(model, **settings) as rt:
        session = rt.session("alice", adapters={one: 1.0})
        first = session.say("Hello", **ASK)
        session.sleep()
        assert session.plan_wake().computed <= 1
    with perdure.open(model, **settings) as rt:
        session = rt.session("alice")
        assert session.plan_wake().computed <= 1
        assert session.wake().computed <= 1
        reply = session.say("And then?", **ASK)
        assert reply.usage.cached_tokens > first.usage.prompt_tokens
        other = session.say("Now without.", adapters={}, **ASK)
        assert other.usage.cached_tokens == 0
        back = session.say("And with it again.", **ASK)
        assert back.usage.cached_tokens > reply.usage.prompt_tokens
        warm = rt.session("bob", adapters={one: 1.0}).say("Hello", **ASK)
        assert warm.text == first.text


@pytest.mark.extension("upkeep")
def test_s7_an_export_names_no_adapter_file(files: tuple[Any, str, str], tmp_path: Path) -> None:
    """S7, I1: nor does an import have one read."""
    model, one, two = files
    source = str(tmp_path / "private" / "a.gguf") if one == "one.gguf" else one
    with perdure.open(model, n_ctx=512, store=tmp_path / "a", adapter_names={"named": two}) as rt:
        session = rt.session("alice", adapters={source: 1.0})
        session.say("Hello", **ASK)
        path = session.export(tmp_path / "alice.perdure", state=False)
        assert source.encode() not in path.read_bytes()
        named = rt.session("bob", adapters={"named": 1.0})
        named.say("Hello", **ASK)
        other = named.export(tmp_path / "bob.perdure")
    with perdure.open(model, n_ctx=512, store=tmp_path / "b", adapter_names={"named": two}) as rt:
        result = rt.sessions.import_(path)
        assert "adapters" not in result.session.settings
        result.session.say("And then?", **ASK)
        result = rt.sessions.import_(other, trust_state=True)
        assert json.loads(json.dumps(dict(result.session.settings)))["adapters"] == {"named": 1.0}
        assert result.state_tokens > 0


@pytest.mark.extension("workers")
def test_a_turn_of_a_child_process_has_its_adapters(zoo_path: Names) -> None:
    one, two = str(zoo_path("llama-lora")), str(zoo_path("llama-lora2"))
    model = str(zoo_path("llama"))
    with perdure.open(model, n_ctx=256, adapters={one: 1.0}, threads=1) as rt:
        expected = [rt.generate("Once", adapters=each, **ASK).text for each in (None, {}, {two: 1.0})]
    with perdure.open(
        model, n_ctx=256, adapters={one: 1.0}, adapter_names={"second": two}, threads=1, isolated=True
    ) as rt:
        assert [
            rt.generate("Once", adapters=each, **ASK).text for each in (None, {}, {"second": 1.0})
        ] == expected
        with pytest.raises(ModelNotFoundError):
            rt.generate("Once", adapters={"third": 1.0}, **ASK)
        with pytest.raises(perdure.PerdureError):
            rt.generate("Once", adapters={model: 1.0}, **ASK)


@pytest.mark.extension("workers")
def test_a_store_in_use_with_other_adapters_is_refused(zoo_path: Names, tmp_path: Path) -> None:
    """C11: what another process computes with is part of what is asked of it."""
    one, model = str(zoo_path("llama-lora")), str(zoo_path("llama"))
    with perdure.open(model, n_ctx=256, adapters={one: 1.0}, store=tmp_path, threads=1):
        with pytest.raises(StoreLockedError, match="adapters"):
            perdure.open(model, adapters={one: 0.5}, store=tmp_path, threads=1)
        with perdure.open(model, adapters={one: 1.0}, store=tmp_path) as again:
            assert again.generate("Once", **ASK).text


def test_the_snippet_of_the_page_runs(
    zoo_path: Names, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, file in (("base", "llama"), ("terse", "llama-lora"), ("pirate", "llama-lora2")):
        shutil.copy(zoo_path(file), tmp_path / f"{name}.gguf")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "adapters.md", "exec"), {})


def test_wrong_files_are_refused_when_a_runtime_is_opened(zoo_path: Names, tmp_path: Path) -> None:
    model = str(zoo_path("llama"))
    for wrong in (str(zoo_path("mamba")), str(tmp_path / "missing.gguf"), "nobody"):
        with pytest.raises(perdure.PerdureError):
            perdure.open(model, n_ctx=256, adapters={wrong: 1.0}, threads=1)
        with pytest.raises(perdure.PerdureError):
            perdure.open(model, n_ctx=256, adapter_names={"name": wrong}, threads=1)
    with pytest.raises(InvalidInputError):
        perdure.open(model, n_ctx=256, adapter_names={"a/b": str(zoo_path("llama-lora"))}, threads=1)


@pytest.mark.extension("embeddings")
def test_vectors_are_those_of_their_adapters(files: tuple[Any, str, str]) -> None:
    """C10: beside each other, in any order; also with one that a text switches on."""
    model, one, two = files
    text = "word " * 30
    with perdure.open(model, n_ctx=256) as rt:
        plain, with_one = rt.embed(text).vectors, rt.embed(text, adapters={one: 2.0}).vectors
        assert plain.tobytes() != with_one.tobytes()
        assert rt.embed(text, adapters={one: 0.0}).vectors.tobytes() == plain.tobytes()
        waiting = [
            rt.submit_embed(text, adapters=each) for each in ({one: 2.0}, None, {two: 1.0}, {one: 2.0})
        ]
        first, second, third, again = (each.result().vectors.tobytes() for each in waiting)
        assert first == again == with_one.tobytes() != third
        assert second == plain.tobytes()
        assert rt.generate("Once", **ASK).text
        with pytest.raises(ModelNotFoundError):
            rt.embed(text, adapters={"nobody": 1.0})
    with perdure.open(model, n_ctx=256, adapters={one: 2.0}) as rt:
        assert rt.embed(text).vectors.tobytes() == with_one.tobytes()
        assert rt.embed(text, adapters={}).vectors.tobytes() == plain.tobytes()


@pytest.mark.extension("embeddings")
def test_an_activated_lora_counts_from_its_invocation_in_a_vector_too(zoo_path: Names) -> None:
    model, judge = str(zoo_path("llama")), str(zoo_path("llama-alora"))
    before, behind = list(range(40, 60)), list(range(60, 70))
    with perdure.open(model, n_ctx=256, threads=1) as rt:
        quiet = [*before, *behind]
        loud = [*before, *INVOCATION, *behind]
        assert rt.embed(quiet, adapters={judge: 1.0}).vectors.tobytes() == rt.embed(quiet).vectors.tobytes()
        assert rt.embed(loud, adapters={judge: 1.0}).vectors.tobytes() != rt.embed(loud).vectors.tobytes()


@pytest.mark.extension("embeddings")
def test_vectors_of_a_child_process_have_their_adapters(zoo_path: Names) -> None:
    model, one = str(zoo_path("llama")), str(zoo_path("llama-lora"))
    settings: dict[str, Any] = {"n_ctx": 256, "threads": 1, "adapter_names": {"one": one}}
    with perdure.open(model, **settings) as rt:
        expected = rt.embed("Hello", adapters={"one": 1.0}).vectors.tobytes()
    with perdure.open(model, isolated=True, **settings) as rt:
        assert rt.embed("Hello", adapters={"one": 1.0}).vectors.tobytes() == expected
        assert rt.embed("Hello").vectors.tobytes() != expected
