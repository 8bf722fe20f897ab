"""`perdure analyse`: one page that needs nothing else, whatever the text is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import perdure
from perdure import ContextOverflow, Model
from perdure.cli import main
from perdure.inspection.analysis import analyse
from perdure.inspection.page import page_of

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


def test_a_hostile_text_stays_text(zoo_path: ZooPath) -> None:
    page = analysed(zoo_path("llama"), HOSTILE)
    assert "<img" not in page
    assert page.count("</script>") == 2


def test_a_text_that_is_too_long_is_refused_before_anything_is_computed(zoo_path: ZooPath) -> None:
    model = Model(zoo_path("llama"))
    with (
        perdure.open(model, n_ctx=512, slots=1, threads=1) as rt,
        pytest.raises(ContextOverflow, match="at most 2048 tokens"),
    ):
        analyse(rt, model, [5] * 3000, title="long")


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
