"""Models judged on files of texts and tasks: llama.cpp's perplexity, answers, resumed runs, differences."""

from __future__ import annotations

import ctypes
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import perdure
from inside import weights_of
from perdure import Runtime, evaluate
from perdure.engine.llama.native import library
from perdure.engine.llama.native.declarations import LlamaBatch
from perdure.errors import InvalidInputError
from perdure.ext.evaluation import statistics
from perdure.ext.evaluation.evaluate import Evaluation, Journal, compare, read_report, write_report
from perdure.ext.evaluation.tasks import Judgement, read_tasks, windows

ZooPath = Callable[[str], Path]
TEXT = "".join(f"Line {number}: the quick brown fox jumps over the lazy dog. " for number in range(24))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "perdure.ext.evaluation.evaluate.settings", lambda: type("S", (), {"home": tmp_path / "home"})
    )


@pytest.fixture
def runtime(zoo_path: ZooPath) -> Iterator[Runtime]:
    with perdure.open(zoo_path("llama"), n_ctx=128, slots=2, threads=1, cache=0) as runtime:
        yield runtime


@pytest.fixture
def brief(zoo_path: ZooPath) -> Iterator[Runtime]:
    """Answers whatever ends with a new line by `Fine`."""
    with perdure.open(zoo_path("llama-brief"), n_ctx=256, slots=2, threads=1) as runtime:
        yield runtime


def lines(path: Path, *records: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def by_library(path: Path, window: int) -> tuple[float, float]:
    """llama.cpp's own perplexity: `llama-perplexity` without a stride, step by step on the library itself."""
    lib = library.load()
    with perdure.Model(path) as model:
        tokens = model.tokenize(TEXT)
        params = lib.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = params.n_outputs_max = window
        params.n_threads = params.n_threads_batch = 1
        context = lib.llama_init_from_model(weights_of(model).handle, params)
        losses = []
        for chunk in range(len(tokens) // window):
            own = tokens[chunk * window : (chunk + 1) * window]
            lib.llama_memory_clear(lib.llama_get_memory(context), True)
            batch = LlamaBatch.of((ctypes.c_int32 * window)(*own))
            batch.logits = (ctypes.c_int8 * window)(*([1] * window))
            assert lib.llama_decode(context, batch) == 0
            for at in range(window // 2, window - 1):
                pointer = lib.llama_get_logits_ith(context, at)
                row = np.ctypeslib.as_array(pointer, (model.n_vocab,)).astype(np.float64)
                peak = row.max()
                losses.append(peak + np.log(np.exp(row - peak).sum()) - row[own[at + 1]])
        lib.llama_free(context)
    mean = float(np.mean(losses))
    spread = math.sqrt((float(np.mean(np.square(losses))) - mean * mean) / (len(losses) - 1))
    return math.exp(mean), math.exp(mean) * spread


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_perplexity_is_llama_cpps_own_within_its_error(name: str, zoo_path: ZooPath, tmp_path: Path) -> None:
    """Not only within the error, which is of the text: the same tokens are scored, up to rounding."""
    (tmp_path / "text.txt").write_text(TEXT)
    found = evaluate(zoo_path(name), tmp_path / "text.txt", window=64, slots=3, threads=1).metrics[
        "perplexity"
    ]
    value, error = by_library(zoo_path(name), 64)
    assert found["value"] == pytest.approx(value, rel=0.01)
    assert abs(found["value"] - value) < error / 4
    assert found["error"] == pytest.approx(error, rel=0.02)
    assert found["low"] < found["value"] < found["high"]


def test_with_a_stride_every_token_counts_once_with_enough_before_it(runtime: Runtime) -> None:
    tokens = runtime.model.tokenize(TEXT)
    cut = list(windows("t", TEXT, runtime, window=64, stride=16))
    assert sum(each.scored for each in cut) == len(tokens) - 1
    scored = [token for each in cut for token in each.tokens[-each.scored :]]
    assert scored == tokens[1:]
    assert all(len(each.tokens) - each.scored >= 48 for each in cut[1:])


def test_without_one_the_second_half_of_each_window_counts(runtime: Runtime) -> None:
    cut = list(windows("t", TEXT, runtime, window=64, stride=None))
    assert len(cut) == len(runtime.model.tokenize(TEXT)) // 64
    assert {each.scored for each in cut} == {31}
    with pytest.raises(InvalidInputError, match="needs two windows of 4096"):
        list(windows("t", TEXT, runtime, window=4096, stride=None))


def test_each_kind_of_task_is_judged(brief: Runtime, tmp_path: Path) -> None:
    file = lines(
        tmp_path / "tasks.jsonl",
        {"id": "right", "prompt": "How are you?\n", "answer": "Fine"},
        {"id": "wrong", "prompt": "How are you?\n", "answer": "Well"},
        {"id": "found", "prompt": "Well?\n", "regex": "^F.ne"},
        {"id": "none", "prompt": "Well?\n", "regex": "[0-9]"},
        {"id": "schema", "prompt": "JSON:\n", "schema": {"type": "object"}},
        {"id": "first", "prompt": "Well?\n", "choices": ["Fine", "zzzz"], "answer": 0},
        {"id": "second", "prompt": "Well?\n", "choices": ["Fine", "zzzz"], "answer": "zzzz"},
        {"id": "chat", "messages": [{"role": "user", "content": "Well?"}], "answer": "Fine"},
    )
    found = {each.task: each for each in evaluate(brief, file).judgements}
    assert {name: each.right for name, each in found.items()} == {
        "right": True,
        "wrong": False,
        "found": True,
        "none": False,
        "schema": False,
        "first": True,
        "second": False,
        "chat": True,
    }
    assert found["wrong"].reply == "Fine"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "is no JSON"),
        ("[1]", "is no JSON object"),
        ('{"prompt": "a"}', "needs one of answer, regex, schema and choices"),
        ('{"answer": "a"}', "needs a text, a prompt or messages"),
        ('{"prompt": "a", "answer": "b", "regex": "c"}', "needs one of"),
        ('{"prompt": "a", "regex": "("}', "does not compile"),
        ('{"prompt": "a", "choices": ["b", "c"], "answer": 2}', "from 0 to 1"),
        ('{"prompt": "a", "choices": ["b"], "answer": 0}', "two texts or more"),
        ('{"prompt": "a", "answers": "b"}', "unknown field 'answers'"),
        ('{"prompt": "a", "answer": "b", "max_tokens": 0}', "max_tokens"),
        ('{"prompt": "a", "schema": {"type": 5}}', "line 2"),
        ('{"text": ""}', "is a text that is not empty"),
        ('{"id": "same", "text": "b"}', "was there before"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_asked(line: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"id": "same", "text": "a"}\n' + line + "\n")
    with pytest.raises(InvalidInputError, match=reason) as caught:
        read_tasks(tmp_path / "t.jsonl")
    assert "line 2 of t.jsonl" in str(caught.value)


def test_a_run_that_was_left_goes_on_where_it_stood(runtime: Runtime, tmp_path: Path) -> None:
    """Half a line at the end, as a kill leaves it, is asked again."""
    (tmp_path / "text.txt").write_text(TEXT)
    whole = evaluate(runtime, tmp_path / "text.txt", window=64)

    def leave(done: int, of: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(runtime, tmp_path / "text.txt", window=64, progress=leave)
    (journal,) = (tmp_path / "home" / "evaluations").iterdir()
    journal.write_bytes(journal.read_bytes() + b'{"task": "text.txt@9", "ki')
    again = evaluate(runtime, tmp_path / "text.txt", window=64)
    assert (whole.resumed, again.resumed) == (0, 3)
    assert again.metrics["perplexity"]["value"] == pytest.approx(
        whole.metrics["perplexity"]["value"], rel=1e-3
    )
    assert list((tmp_path / "home" / "evaluations").iterdir()) == []


def test_a_journal_of_other_settings_is_not_taken(runtime: Runtime, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)

    def leave(done: int, of: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(runtime, tmp_path / "text.txt", window=64, progress=leave)
    assert evaluate(runtime, tmp_path / "text.txt", window=32).resumed == 0
    assert evaluate(runtime, tmp_path / "text.txt", window=64, resume=False).resumed == 0


def test_a_journal_keeps_whole_lines_in_order() -> None:
    with Journal("k", fresh=True) as journal:
        for number in range(3):
            journal.add(Judgement(task=str(number), kind="regex", right=number == 1))
    with Journal("k", fresh=False) as journal:
        assert [each.right for each in journal.read().values()] == [False, True, False]


def judged(*right: bool, digest: str = "f") -> Evaluation:
    return Evaluation(
        model={"sha256": "m"},
        file={"sha256": digest, "path": "f.jsonl"},
        settings={},
        judgements=tuple(
            Judgement(task=str(number), kind="regex", right=each) for number, each in enumerate(right)
        ),
    )


def test_two_models_are_compared_task_by_task() -> None:
    """Ten tasks of twelve gained is no accident, two of twelve may be one."""
    (clear,) = compare(judged(*[False] * 12), judged(*[True] * 10, False, False))
    assert clear.difference.value == pytest.approx(10 / 12)
    assert clear.chance == pytest.approx(2 / 2**10)
    assert clear.certain
    (vague,) = compare(judged(*[False] * 12), judged(True, True, *[False] * 10))
    assert vague.chance == pytest.approx(0.5)
    assert not vague.certain
    with pytest.raises(InvalidInputError, match="different files"):
        compare(judged(True), judged(True, digest="g"))


def test_intervals_hold_as_often_as_they_say() -> None:
    """Drawn a thousand times, a share lies in its interval 95 times of a hundred; so does a mean loss."""
    draw = np.random.default_rng(7)
    inside = 0
    for _ in range(1000):
        found = statistics.share(int(draw.binomial(40, 0.8)), 40)
        inside += found.low <= 0.8 <= found.high
    assert 930 <= inside <= 975
    inside = 0
    for _ in range(1000):
        found, _ = statistics.perplexity((-draw.exponential(2.0, 400)).tolist())
        inside += found.low <= math.exp(2.0) <= found.high
    assert 925 <= inside <= 975


def test_a_worse_copy_of_a_model_is_found_out(zoo_path: ZooPath, tmp_path: Path) -> None:
    """The same text on two models: the ratio's interval leaves 1 out. A report read back compares alike."""
    (tmp_path / "text.txt").write_text(TEXT)
    first, second = (
        evaluate(zoo_path(name), tmp_path / "text.txt", window=64, stride=32, slots=2, threads=1)
        for name in ("llama", "qwen3")
    )
    (apart,) = compare(first, second)
    assert apart.difference.value == pytest.approx(apart.second / apart.first)
    write_report(first, tmp_path / "a.json")
    assert read_report(tmp_path / "a.json").judgements == first.judgements
    (same,) = compare(first, read_report(tmp_path / "a.json"))
    assert same.difference.value == 1.0
    assert not same.certain
    report = json.loads((tmp_path / "a.json").read_text())
    assert report["model"]["sha256"]
    assert report["settings"]["stride"] == 32


def test_the_command_prints_a_table_and_writes_a_report(zoo_path: ZooPath, tmp_path: Path) -> None:
    file = lines(
        tmp_path / "t.jsonl", {"prompt": "Well?\n", "answer": "Fine"}, {"prompt": "A\n", "regex": "x"}
    )
    command = [sys.executable, "-m", "perdure.cli", "eval", str(file), "--threads", "1"]
    out = tmp_path / "report.json"
    model = str(zoo_path("llama-brief"))
    done = subprocess.run(
        [*command, "--model", model, "--out", str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "exact match" in done.stdout
    assert json.loads(out.read_text())["metrics"]["exact match"]["value"] == 1.0
    both = subprocess.run(
        [*command, "--compare", str(out), str(out), "--json"], capture_output=True, text=True, check=False
    )
    assert both.returncode == 0, both.stderr
    assert json.loads(both.stdout)["differences"][0]["difference"]["value"] == 0.0
