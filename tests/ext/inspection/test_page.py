"""`perdure analyse`: one page that needs nothing else, whatever the text is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import perdure
from perdure import ContextOverflow, Model, OutOfMemoryError, Runtime, system
from perdure.backend import LocalBackend
from perdure.cli import main
from perdure.engine.adapters import PLAIN, AdapterTable
from perdure.engine_config import EngineConfig
from perdure.ext.cluster.places import DirectoryPlace
from perdure.ext.cluster.shared import SharedTier
from perdure.ext.inspection.analysis import ReplyFigures, analyse, check_memory, examine, needed_bytes
from perdure.ext.inspection.page import page_of
from perdure.ext.inspection.vectors import write_vector
from perdure.models import read_parts
from perdure.models.placement import Sizes

ZooPath = Callable[[str], Path]
HOSTILE = "</script><img src=x onerror=alert(1)> <!--DATA--> & \u2028 'q\" text"


def analysed(path: Path, text: str, max_tokens: int = 4) -> str:
    model = Model(path)
    with perdure.open(model, n_ctx=512, slots=1, threads=1) as rt:
        return page_of(analyse(rt, model, model.tokenize(text), title=text, max_tokens=max_tokens))


def test_a_page_loads_nothing_and_shows_every_part(zoo_path: ZooPath) -> None:
    page = analysed(zoo_path("llama"), "hello there, this is a text")
    assert "default-src 'none'" in page
    assert not re.search(r"(?:src|href)=", page)
    for title in ("Surprise along", "Attention by head", "Keys and values", "Logit lens", "Layers"):
        assert f"<h2>{title}" in page
    found = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    assert len(data["heads"]) == 3 * 4
    assert data["size"] == len(data["tokens"])


def test_experts_are_on_the_page_and_what_is_missing_is_said(zoo_path: ZooPath) -> None:
    assert "<h2>Experts" in analysed(zoo_path("qwen3moe"), "a text")
    page = analysed(zoo_path("mamba"), "a text")
    assert "No keys and values" in page
    assert "No attention" in page
    assert "<h2>Attention" not in page
    page = analysed(zoo_path("gemma3"), "a text that is longer than the window of this model " * 6)
    assert "<h2>Keys and values" in page
    assert re.search(r"Keys and values from token \d+ on: a window has no earlier ones", page)


def test_the_page_tells_the_time_of_each_tier(zoo_path: ZooPath, tmp_path: Path) -> None:
    """Computed, out of the slot, out of memory, and after a restart from the disk."""
    path, text = zoo_path("llama"), "the time that a text takes, by where its state was " * 4

    def page(rt: perdure.Runtime, model: Model, text: str) -> str:
        return page_of(analyse(rt, model, model.tokenize(text), title="t", max_tokens=1))

    model = Model(path)
    with perdure.open(model, n_ctx=512, slots=1, threads=1, store=tmp_path / "store") as rt:
        assert re.search(r"computed</text>.*?\d+ tokens in \d+\.\d{4} s", page(rt, model, text))
        page(rt, model, "something else that takes the slot for itself")
        assert re.search(r"memory</text>.*?\d+ tokens in \d+\.\d{4} s", page(rt, model, text))
        rt.cache.sleep(model.tokenize(text))
    model = Model(path)
    with perdure.open(model, n_ctx=512, slots=1, threads=1, store=tmp_path / "store") as rt:
        assert re.search(r"disk</text>.*?\d+ tokens in \d+\.\d{4} s", page(rt, model, text))


def test_the_page_tells_the_time_of_state_that_other_machines_share(
    zoo_path: ZooPath, tmp_path: Path
) -> None:
    """Computed and stored by one runtime, read out of the place that both share by the next."""
    path, text = zoo_path("llama"), "a text whose state is in a folder of several machines " * 4
    tokens = Model(path).tokenize(text)
    for name in ("first", "second"):
        tier = SharedTier(DirectoryPlace(tmp_path), key=b"k" * 32, identity=b"i", budget=1 << 30)
        model = Model(path)
        config = EngineConfig(n_ctx=512, slots=1, threads=1)
        backend = LocalBackend(model, config, tiers=[tier], own_model=True)
        with Runtime(backend) as rt:
            page = page_of(analyse(rt, model, tokens, title=name, max_tokens=1))
            rt.cache.sleep(tokens)
    assert re.search(r"shared</text>.*?\d+ tokens in \d+\.\d{4} s", page)


def test_a_long_text_is_traced_at_its_end_and_says_so(zoo_path: ZooPath) -> None:
    """The weights of the last tokens are those of a trace of all of them."""
    model = Model(zoo_path("llama"))
    tokens = [(7 * at) % 60 + 1 for at in range(500)]
    found = examine(model, tokens, prompt=490, title="t", figures=ReplyFigures(), threads=1)
    assert found.trace is not None
    assert found.trace.attention is not None
    assert found.trace.attention.shape == (3, 4, 384, 500)
    assert "Attention, layers and experts of the last 384 tokens." in found.notes
    with model.context(n_ctx=512, threads=1) as ctx:
        ctx.decode(tokens)
        whole = ctx.trace(what=("hidden", "attention"))
    assert whole.attention is not None
    assert whole.hidden is not None
    assert found.trace.hidden is not None
    np.testing.assert_allclose(found.trace.attention, whole.attention[:, :, 116:], atol=1e-3)
    np.testing.assert_allclose(found.trace.hidden, whole.hidden[:, 116:], atol=2e-2)


def test_what_does_not_fit_into_memory_is_refused_before_anything_is_loaded(
    zoo_path: ZooPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = Sizes.of(read_parts(zoo_path("llama")))
    check_memory(sizes, 100)
    assert needed_bytes(sizes, 4000) > needed_bytes(sizes, 100) > sizes.weights
    monkeypatch.setattr(system, "available_memory", lambda: 100 << 20)
    with pytest.raises(OutOfMemoryError, match=r"\d+ MiB, since .* 100 MiB are free"):
        check_memory(sizes, 100)


def test_a_turn_tells_what_its_reply_has_told(zoo_path: ZooPath, tmp_path: Path) -> None:
    """Tokens and times by tier are those of the reply, also after a restart."""
    path = zoo_path("llama")
    with perdure.open(path, store=tmp_path, n_ctx=512, slots=1, threads=1) as rt:
        rt.session("a").say("hello " * 40, max_tokens=4)
    with perdure.open(path, store=tmp_path, n_ctx=512, slots=1, threads=1) as rt:
        reply = rt.session("a").say("more", max_tokens=4)
        told, kept = reply.raw, rt.session("a").history()[-1]
        assert reply.reuse.tiers.keys() == reply.reuse.seconds.keys() == {"disk"}
    one, other = ReplyFigures.of_reply(told), ReplyFigures.of_usage(kept.counts)
    assert other.tiers == one.tiers
    assert other.tier_seconds == pytest.approx(one.tier_seconds, abs=1e-5)
    assert dict(other.seconds) == pytest.approx(dict(one.seconds), abs=2e-3)


def test_a_reply_is_looked_into_with_the_adapters_that_it_was_written_with(
    zoo_path: ZooPath, tmp_path: Path
) -> None:
    """Its surprise is what the runtime itself says with that control vector."""
    model = Model(zoo_path("llama"))
    tokens = model.tokenize("a text of some length")
    hidden = model.trace(tokens, what="hidden").hidden
    assert hidden is not None
    file = str(tmp_path / "v.gguf")
    write_vector(file, 3 * hidden[1:, -1], model.info.architecture)
    adapters = AdapterTable(model.adapter).resolve({file: 1.0}, tokens)
    found, plain = (
        examine(model, tokens, prompt=4, title="t", figures=ReplyFigures(), adapters=each, threads=1)
        for each in (adapters, PLAIN)
    )
    with perdure.open(model, n_ctx=512, slots=1, threads=1) as rt:
        reply = rt.generate(tokens, prompt_logprobs=0, max_tokens=1, temperature=0, adapters={file: 1.0})
    assert reply.prompt_logprobs is not None
    expected = [each.logprob for each in reply.prompt_logprobs if each is not None]
    surprise, without = (
        [each.logprob for each in one.measures if each is not None] for one in (found, plain)
    )
    assert surprise == pytest.approx(expected[-len(surprise) :], abs=2e-2)
    assert surprise != pytest.approx(without, abs=2e-2)


def test_a_hostile_text_stays_text(zoo_path: ZooPath) -> None:
    page = analysed(zoo_path("llama"), HOSTILE)
    assert "<img" not in page
    assert page.count("</script>") == 2


def test_a_text_that_is_too_long_is_refused_before_anything_is_computed(zoo_path: ZooPath) -> None:
    model = Model(zoo_path("llama"))
    with (
        perdure.open(model, n_ctx=512, slots=1, threads=1) as rt,
        pytest.raises(ContextOverflow, match="at most 4096 tokens"),
    ):
        analyse(rt, model, [5] * 5000, title="long")


def test_the_command_takes_a_prompt_or_a_session(
    zoo_path: ZooPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    path = zoo_path("llama")
    with perdure.open(path, store=tmp_path / "store", n_ctx=512, slots=1, threads=1) as rt:
        rt.session("alice").say("hello", max_tokens=4)

    def command(*arguments: str) -> None:
        monkeypatch.setattr("sys.argv", ["perdure", "analyse", *arguments, "-m", str(path), "-n", "2"])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code

    command("a prompt", "--raw")
    assert "a prompt" in (tmp_path / "analysis.html").read_text()
    command("alice", "--store", str(tmp_path / "store"), "-o", "s.html")
    page = (tmp_path / "s.html").read_text()
    assert "<h1>alice</h1>" in page
    # Its state was there, and was not computed again.
    assert re.search(r">(slot|memory|disk)</text>", page)
