"""How benchmarks measure, judge and report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from bench.__main__ import benches
from bench.child import Child
from bench.harness import Bench, Figure, Gauge, Pairs, Run, Target, at_least, at_most, interleave
from bench.machine import Machine, Watch

from bench import harness

IDLE = Machine(cores=2, others=0.01, seconds=3.0)
BUSY = Machine(cores=2, others=0.85, seconds=3.0)


def figure(
    ours: Sequence[float],
    peer: Sequence[float],
    *,
    gauge: Gauge = Gauge.RATE,
    target: Target | None = None,
    machine: Machine = IDLE,
    unit: str = "tok/s",
) -> Figure:
    return Figure(
        name="decode",
        against="a bare loop",
        unit=unit,
        gauge=gauge,
        pairs=Pairs(tuple(ours), tuple(peer)),
        target=target or at_least(0.98),
        machine=machine,
    )


def steady(value: float, times: list[str], mark: str) -> Callable[[], float]:
    def measure() -> float:
        times.append(mark)
        return value

    return measure


def bench_of(*figures: Figure) -> Bench:
    def part(_: Run) -> Iterator[Figure]:
        yield from figures

    return Bench("sample", (part,))


class TestRatio:
    def test_of_rates_is_ours_over_the_peers(self) -> None:
        assert figure([20], [10]).ratio == 2

    def test_of_costs_is_the_peers_over_ours(self) -> None:
        assert figure([20], [10], gauge=Gauge.COST).ratio == 0.5

    def test_of_growth_is_the_larger_size_over_the_smaller(self) -> None:
        assert figure([12], [10], gauge=Gauge.GROWTH).ratio == 1.2

    def test_of_nothing_at_all_is_infinite(self) -> None:
        assert figure([0], [10], gauge=Gauge.COST).ratio == float("inf")

    def test_is_the_median_over_pairs_so_that_a_slow_moment_of_the_machine_cancels_out(self) -> None:
        slow_for_a_while = figure([100, 100, 20, 20, 20], [100, 100, 20, 20, 100])
        assert slow_for_a_while.ratio == 1
        assert slow_for_a_while.ours == 20
        assert slow_for_a_while.peer == 100


class TestTarget:
    @pytest.mark.parametrize(
        ("target", "text"),
        [
            (at_least(0.98), "at least 0.98×"),
            (at_most(1.5), "at most 1.5×"),
            (at_most(10, "µs"), "at most 10 µs"),
        ],
    )
    def test_reads_as_it_is_meant(self, target: Target, text: str) -> None:
        assert str(target) == text

    def test_without_a_unit_judges_the_ratio(self) -> None:
        assert at_least(0.98).met(ratio=0.98, ours=0)
        assert not at_least(0.98).met(ratio=0.979, ours=100)

    def test_with_a_unit_judges_our_own_value(self) -> None:
        assert at_most(10, "µs").met(ratio=0.1, ours=10)
        assert not at_most(10, "µs").met(ratio=100, ours=10.1)


class TestLine:
    def test_has_the_ratio_first_then_the_comparison_the_verdict_and_the_machine(self) -> None:
        assert str(figure([94.84, 94.84], [95.6, 95.6])) == (
            " 0.992×  decode: ours 94.8 tok/s, a bare loop 95.6 tok/s | at least 0.98×: ok | "
            "2 cores, others used 0.01 (idle), 2 repeats, spread 0.0%"
        )

    def test_says_miss(self) -> None:
        assert "| at least 0.98×: MISS |" in str(figure([90], [100]))

    def test_says_when_the_machine_was_not_idle(self) -> None:
        assert "others used 0.85 (NOT IDLE)" in str(figure([90], [100], machine=BUSY))

    def test_gives_the_spread_of_the_middle_half(self) -> None:
        assert "5 repeats, spread 2.0%" in str(figure([90, 99, 100, 101, 250], [100] * 5))

    def test_keeps_digits_that_mean_something(self) -> None:
        wide = figure([1234.5], [3.14159], unit="ms", gauge=Gauge.COST)
        assert "ours 1,234 ms, a bare loop 3.14 ms" in str(wide)
        assert str(figure([1900], [19])).startswith(" 100.0×")


class TestInterleave:
    def test_takes_turns_and_lets_each_side_begin(self) -> None:
        order: list[str] = []
        pairs = interleave(steady(1, order, "ours"), steady(2, order, "peer"), 3)
        assert order == ["ours", "peer", "peer", "ours", "ours", "peer"]
        assert pairs == Pairs((1, 1, 1), (2, 2, 2))

    def test_stops_early_when_its_time_is_over_but_not_before_three_pairs(self) -> None:
        pairs = interleave(lambda: 1, lambda: 2, 100, seconds=0)
        assert len(pairs.ours) == len(pairs.peer) == 3


class TestCommand:
    def test_prints_one_line_a_figure_and_a_summary(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert bench_of(figure([99], [100]), figure([90], [100]))([]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "sample"
        assert lines[1].startswith(" 0.990×")
        assert lines[2].startswith(" 0.900×")
        assert lines[3:] == ["1 of 2 targets met", "missed: decode"]

    def test_says_at_the_end_that_the_machine_was_not_idle(self, capsys: pytest.CaptureFixture[str]) -> None:
        bench_of(figure([99], [100], machine=BUSY), figure([99], [100]))([])
        assert "THE MACHINE WAS NOT IDLE during 1 of 2 figures" in capsys.readouterr().out

    def test_check_exits_with_1_on_a_miss_only(self) -> None:
        assert bench_of(figure([99], [100]))(["--check"]) == 0
        assert bench_of(figure([99], [100]), figure([90], [100]))(["--check"]) == 1

    def test_json_says_the_same_and_can_be_read_back(self, tmp_path: Path) -> None:
        figures = [
            figure([99.5, 98], [100, 101]),
            figure([4, 5], [3, 2], gauge=Gauge.COST, target=at_most(10, "µs"), unit="µs", machine=BUSY),
        ]
        bench_of(*figures)(["--quick", "--json", str(tmp_path / "out.json")])
        written = json.loads((tmp_path / "out.json").read_text())
        assert written["quick"] is True
        assert [Figure.from_json(each) for each in written["benches"]["sample"]] == figures
        assert [each["line"] for each in written["benches"]["sample"]] == [str(each) for each in figures]
        assert [each["ok"] for each in written["benches"]["sample"]] == [True, True]

    def test_quick_reaches_the_parts(self) -> None:
        seen: list[Run] = []

        def part(run: Run) -> list[Figure]:
            seen.append(run)
            return []

        Bench("sample", (part,))(["--quick"])
        Bench("sample", (part,))([])
        assert [run.pick("full", "quick") for run in seen] == ["quick", "full"]

    def test_only_chooses_parts_by_name(self, capsys: pytest.CaptureFixture[str]) -> None:
        def decode(_: Run) -> list[Figure]:
            return [figure([99], [100])]

        def prefill(_: Run) -> list[Figure]:
            raise AssertionError("was not asked for")

        harness.main([Bench("sample", (decode, prefill))], ["--only", "deco"])
        assert "1 of 1 targets met" in capsys.readouterr().out

    def test_all_benchmarks_are_found_by_their_main(self) -> None:
        assert "engine" in [bench.name for bench in benches()]


class TestMachine:
    def test_watch_counts_no_work_of_our_own_as_that_of_others(self) -> None:
        with Watch() as watch:
            figure_of_work = Run().compare(
                "work",
                ours=lambda: float(sum(range(1000))),
                peer=lambda: float(sum(range(1000))),
                against="the same",
                unit="",
                gauge=Gauge.RATE,
                target=at_least(1),
                repeats=3,
            )
        assert figure_of_work.ok
        assert watch.machine.cores >= 1
        assert watch.machine.others >= 0
        assert watch.machine.seconds > 0


class TestChild:
    def test_answers_calls_in_a_process_without_our_openmp_settings(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GOMP_SPINCOUNT", "7")
        with Child("bench.processes.loops", "burn") as child:
            assert child.ask("resident") > 0
            assert "GOMP_SPINCOUNT" not in child.ask("environment")

    def test_that_dies_says_why(self) -> None:
        with (
            Child("bench.processes.loops", "no such kind") as child,
            pytest.raises(RuntimeError, match="no such kind"),
        ):
            child.ask("resident")


def test_a_side_that_measured_nothing_is_a_figure_and_no_error() -> None:
    """A part whose work took no time at all on a fast machine once ended the whole run."""
    assert figure([0.0, 0.0], [5.0, 4.0]).spread == 0.0
    assert "MISS" in str(figure([0.0, 0.0, 2.0], [5.0, 4.0, 3.0]))


def test_replies_that_never_overlap_have_a_rate() -> None:
    from bench.decode import _rate

    assert _rate({"times": [[0.0, 1.0], [2.0, 4.0]]}) == pytest.approx(3 / 4)
    assert _rate({"times": [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]]}) == pytest.approx(2 / 1)


def test_a_part_whose_peer_is_not_installed_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    def part(_: Run) -> Iterator[Figure]:
        import not_installed  # type: ignore[import-not-found]  # noqa: F401

        yield figure([1.0], [1.0])

    def child(_: Run) -> Iterator[Figure]:
        with Child("not_installed") as started:
            started.ask("anything")
        yield figure([1.0], [1.0])

    missing = Bench("missing", (part, child))
    assert missing([]) == 0
    said = capsys.readouterr().out
    assert "part: not measured" in said
    assert "0 of 0 targets met" in said


def test_a_part_that_fails_lets_the_others_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(_: Run) -> Iterator[Figure]:
        yield figure([1.0], [1.0])
        raise OSError("no room left")

    def whole(_: Run) -> Iterator[Figure]:
        yield figure([2.0], [1.0])

    assert Bench("sample", (broken, whole))([]) == 1
    said = capsys.readouterr().out
    assert "OSError: no room left" in said
    assert "2 of 2 targets met\nFAILED, not measured to the end: sample.broken" in said


def test_a_benchmark_that_is_checked_fails_among_others() -> None:
    """`make bench` ends with an error where a cost grows, and not where a peer is faster."""
    missed = bench_of(figure([1.0], [2.0]))
    assert harness.main([missed], []) == 0
    assert harness.main([missed], ["--check"]) == 1
    checked = Bench("checked", missed.parts, check=True)
    assert harness.main([missed, checked], []) == 1
    assert [bench.name for bench in benches() if bench.check] == ["growth"]
