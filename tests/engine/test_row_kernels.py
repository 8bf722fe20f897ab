"""The row kernels: against a stable sort, and against a draw in plain Python."""

from __future__ import annotations

import inspect
import itertools
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from perdure.engine import parallel, row_kernels
from perdure.engine.row_kernels import NothingToDraw, RowBias, top_k
from perdure.errors import EngineError

FILE = Path(row_kernels.__file__)


def draw(
    rows: NDArray[np.float32],
    k: int,
    cuts: NDArray[np.float64],
    ids: NDArray[np.int64],
    values: NDArray[np.float32],
) -> list[int]:
    return row_kernels.draw(rows, k, [tuple(each) for each in cuts.tolist()], RowBias(ids, values))


def job_of(work: Callable[[], None]) -> Any:
    """The memory of the job that `work` is a part of."""
    return inspect.getclosurevars(work).nonlocals["self"]._memory


def check(rows: NDArray[np.float32], k: int) -> None:
    ids, values = top_k(rows, k)
    for row, found, logits in zip(rows, ids, values, strict=True):
        expected = np.argsort(-row, kind="stable")[:k]
        assert found.tolist() == expected.tolist()
        assert logits.tolist() == row[expected].tolist()


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 1 << 32),
    count=st.integers(1, 5),
    size=st.one_of(st.integers(1, 700), st.sampled_from([128, 256, 4096, 49_152, 70_001])),
    share=st.floats(0.0, 1.0),
    digits=st.sampled_from([None, 0, 1]),
    lost=st.floats(0.0, 1.0),
    stride=st.integers(0, 3),
)
def test_they_are_those_of_a_stable_sort(
    seed: int, count: int, size: int, share: float, digits: int | None, lost: float, stride: int
) -> None:
    """Whatever is equal or ruled out, where the rows do not lie side by side, and for every k."""
    dice = np.random.default_rng(seed)
    rows = dice.normal(0, 3, (count, size + stride)).astype(np.float32)
    rows = rows if digits is None else np.round(rows, digits)
    rows[dice.random(rows.shape) < lost * dice.integers(0, 2)] = -np.inf
    rows = rows[:, stride:]
    check(rows, max(1, round(size * share**4)))


@pytest.mark.parametrize("kind", ["rising", "falling", "equal", "infinite"])
def test_rows_that_are_sorted_or_all_alike(kind: str) -> None:
    size = 10_000
    row = {
        "rising": np.arange(size),
        "falling": -np.arange(size),
        "equal": np.zeros(size),
        "infinite": np.where(np.arange(size) % 3, np.inf, -np.inf),
    }[kind].astype(np.float32)
    for k in (1, 40, 5000, size):
        check(np.stack([row, row]), k)


def test_many_rows_in_several_threads_are_each_drawn_from_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where several engines draw at once, and have to share those who assist."""
    monkeypatch.setattr(parallel, "threads", lambda: 4)
    rows = np.random.default_rng(1).normal(0, 3, (40, 20_000)).astype(np.float32)
    cuts = np.array([(0.95, -3.0, 0.8, number) for number in np.random.default_rng(2).random(40)])
    none: Any = np.empty(0, np.int64), np.empty(0, np.float32)
    expected = [draw(rows[at : at + 1], 40, cuts[at : at + 1], *none)[0] for at in range(40)]

    def engine() -> bool:
        return all(draw(rows, 40, cuts, *none) == expected for _ in range(50))

    with ThreadPoolExecutor(3) as pool:
        assert all(each.result() for each in [pool.submit(engine) for _ in range(3)])


@pytest.mark.parametrize("size", [5, 300, 49_152, 70_001])
@pytest.mark.parametrize("value", [np.nan, -np.nan], ids=["nan", "-nan"])
def test_a_number_that_is_none_is_found_wherever_it_stands(size: int, value: float) -> None:
    rows = np.random.default_rng(1).normal(0, 3, (3, size)).astype(np.float32)
    for at in {0, 1, 3, size // 2, size - 2, size - 1}:
        strange = rows.copy()
        strange[1, at] = value
        with pytest.raises(EngineError, match="no numbers"):
            top_k(strange, 3)
    check(rows, 3)


@pytest.mark.parametrize("k", [0, -1, 11, 1 << 40])
def test_what_would_lead_beside_the_memory_is_refused(k: int) -> None:
    rows = np.zeros((2, 10), np.float32)
    with pytest.raises(ValueError, match="rows of shape"):
        top_k(rows, k)
    others: list[Any] = [rows.astype(np.float64), rows[:, ::2], rows.T]
    for strange in others:
        with pytest.raises(ValueError, match="rows of shape"):
            top_k(strange, 1)


@pytest.mark.parametrize("state", ["missing", "broken", "old"])
def test_kernels_that_do_not_fit_say_what_to_do(state: str, tmp_path: Path) -> None:
    """In a checkout that was updated and not installed again."""
    folder = tmp_path / "parts"
    shutil.copytree(FILE.parent, folder, ignore=shutil.ignore_patterns("__pycache__"))
    made = folder / "librow_kernels.so"
    if state == "old":
        source = folder / "__init__.py"
        source.write_text(source.read_text().replace("\nVERSION = ", "\nVERSION = 1"))
    else:
        made.unlink()
    if state == "broken":
        made.write_bytes(b"\x7fELF and no more")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import parts"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "EngineError: perdure's kernels" in done.stderr
    assert "pip install -e ." in done.stderr


def test_everything_is_ruled_out_but_three() -> None:
    rows = np.full((3, 49_152), -np.inf, np.float32)
    rows[:, [7, 300, 49_151]] = [1.0, 3.0, 2.0]
    ids, values = top_k(rows, 40)
    assert ids[:, :3].tolist() == [[300, 49_151, 7]] * 3
    assert ids[:, 3:].tolist() == [list(range(7)) + list(range(8, 38))] * 3
    assert values[:, :4].tolist() == [[3.0, 2.0, 1.0, -math.inf]] * 3


def drawn(row: NDArray[np.float32], k: int, cuts: Sequence[float], bias: Mapping[int, float]) -> int:
    """A draw as its stages are written down, on lists."""
    top_p, min_p, temperature, number = cuts
    values = [(float(np.float32(value) + np.float32(bias.get(at, 0)))) for at, value in enumerate(row)]
    order = sorted(range(len(values)), key=lambda at: (-values[at], at))[:k]
    peak = values[order[0]]
    shares = [math.exp(values[at] - peak) for at in order]
    kept, before = [], 0.0
    for at, share in zip(order, shares, strict=True):
        if values[at] >= peak + min_p and (before < top_p * sum(shares) or values[at] == peak):
            kept.append(at)
        before += share
    weights = [math.exp((values[at] - peak) / temperature) for at in kept]
    sums = list(itertools.accumulate(weights))
    return next((at for at, total in zip(kept, sums, strict=True) if total > number * sums[-1]), kept[-1])


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 1 << 32),
    size=st.one_of(st.integers(1, 700), st.just(5000)),
    k=st.integers(1, 50),
    digits=st.sampled_from([None, 0, 1]),
    top_p=st.sampled_from([0.01, 0.31, 0.97, math.inf]),
    min_p=st.sampled_from([-math.inf, -5.0, -0.3]),
    temperature=st.sampled_from([0.05, 0.8, 3.0]),
    biased=st.dictionaries(st.integers(0, 699), st.sampled_from([-math.inf, -3.0, 2.5, 30.0]), max_size=9),
)
def test_m6_a_draw_is_what_its_stages_say(
    seed: int,
    size: int,
    k: int,
    digits: int | None,
    top_p: float,
    min_p: float,
    temperature: float,
    biased: dict[int, float],
) -> None:
    dice = np.random.default_rng(seed)
    rows = dice.normal(0, 3, (4, size)).astype(np.float32)
    rows = rows if digits is None else np.round(rows, digits)
    # Numbers of no pattern: on a boundary, the last bit of an exponential would decide.
    cuts = np.array([(top_p, min_p, temperature, number) for number in dice.random(4)])
    bias = {token: value for token, value in sorted(biased.items()) if token < size}
    ids, values = np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)
    if all(bias.get(at) == -math.inf for at in range(size)):
        with pytest.raises(NothingToDraw):
            draw(rows, min(k, size), cuts, ids, values)
        return
    found = draw(rows, min(k, size), cuts, ids, values)
    assert found == [
        drawn(row, min(k, size), each, bias) for row, each in zip(rows, cuts.tolist(), strict=True)
    ]


def test_an_impossible_token_is_not_drawn_by_rounding() -> None:
    row = np.full((1, 300), -np.inf, np.float32)
    row[0, [7, 8]] = 0.0
    none: Any = np.empty(0, np.int64), np.empty(0, np.float32)
    assert draw(row, 40, np.array([[math.inf, -math.inf, 1.0, 1.0]]), *none) == [8]


def test_an_exponential_is_right_to_the_last_bits() -> None:
    """By how often one of two is drawn: at the number where that changes, the weights are known."""
    none: Any = np.empty(0, np.int64), np.empty(0, np.float32)
    for depth in (0.0, -0.1, -0.3465, -0.3466, -1.0, -7.5, -30.0, -700.0):
        row = np.array([[0.0, depth]], np.float32)
        share = 1 / (1 + math.exp(float(row[0, 1])))
        for number, token in ((share * (1 - 1e-15), 0), (min(share * (1 + 1e-15), 1 - 2**-53), 1)):
            if share < 1 - 1e-14 or token == 0:
                assert draw(row, 2, np.array([[math.inf, -math.inf, 1.0, number]]), *none) == [token]


@pytest.mark.parametrize("size", [8, 49_152])
def test_biased_tokens_beside_the_memory_are_refused(size: int) -> None:
    rows, cuts = np.zeros((2, size), np.float32), np.ones((2, 4))
    for token in (-1, size, 1 << 40):
        with pytest.raises(ValueError, match="biased tokens"):
            draw(rows, 1, cuts, np.array([token]), np.ones(1, np.float32))
    with pytest.raises(ValueError, match="cuts"):
        draw(rows, 1, cuts[:1], np.empty(0, np.int64), np.empty(0, np.float32))
    with pytest.raises(ValueError, match="biases"):
        draw(rows, 1, cuts, np.array([1]), np.empty(0, np.float32))


def test_who_comes_late_to_a_draw_finds_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job that it looks at is still that one, though everybody else has forgotten it."""
    late: list[Callable[[], None]] = []
    monkeypatch.setattr(row_kernels, "SHARED", 0)
    monkeypatch.setattr(parallel, "assist", lambda work, most: late.append(work))
    none: Any = np.empty(0, np.int64), np.empty(0, np.float32)
    cuts = np.array([(math.inf, -math.inf, 1.0, 1.0)] * 2)
    for _ in range(50):
        assert draw(np.zeros((2, 300), np.float32), 40, cuts, *none) == [39, 39]
    others = [type(job_of(work))() for work in late]
    for work in late:
        work()
    assert not any(map(any, others))


def test_rows_are_finished_before_their_memory_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a Ctrl-C comes when others have begun with them, or are about to."""
    rows = np.random.default_rng(1).normal(0, 3, (40, 20_000)).astype(np.float32)
    jobs: list[Any] = []

    assist = parallel.assist

    def interrupted(work: Callable[[], None], most: int) -> None:
        jobs.append(job_of(work))
        assist(work, most)
        raise KeyboardInterrupt

    monkeypatch.setattr(parallel, "threads", lambda: 4)
    monkeypatch.setattr(parallel, "assist", interrupted)
    none: Any = np.empty(0, np.int64), np.empty(0, np.float32)
    with pytest.raises(KeyboardInterrupt):
        draw(rows, 40, np.array([(0.95, -3.0, 0.8, 0.5)] * 40), *none)
    assert jobs[0][row_kernels._FIELDS - 2] == 40
