"""Figures: how they are measured, judged and reported.

A benchmark is a module with

    def decode(run: Run) -> Iterator[Figure]:
        yield run.compare(
            "decode", ours=our_speed, peer=its_speed, against="a bare loop", unit="tok/s",
            gauge=Gauge.RATE, target=at_least(0.98), repeats=run.pick(31, 7),
        )

    main = Bench("engine", (decode,))

    if __name__ == "__main__":
        sys.exit(main())
"""

from __future__ import annotations

import argparse
import enum
import json
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from bench.child import PeerMissingError
from bench.machine import Machine, Watch

T = TypeVar("T")
Measure = Callable[[], float]


class Gauge(enum.Enum):
    """What a value means, which decides what the ratio divides."""

    RATE = "rate"
    """More is better. The ratio is ours ÷ peer: above 1, ours is better."""
    COST = "cost"
    """Less is better. The ratio is peer ÷ ours: above 1, ours is better."""
    GROWTH = "growth"
    """A cost at a larger size against the same cost at a smaller one. The ratio is larger ÷ smaller."""

    def ratio(self, ours: float, peer: float) -> float:
        above, below = (peer, ours) if self is Gauge.COST else (ours, peer)
        return above / below if below else float("inf")


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure must reach. With a unit it judges our own value, else the ratio."""

    bound: str
    limit: float
    unit: str | None = None

    def met(self, *, ratio: float, ours: float) -> bool:
        value = ratio if self.unit is None else ours
        return value >= self.limit if self.bound == "at least" else value <= self.limit

    def __str__(self) -> str:
        return f"{self.bound} {self.limit:g}" + ("×" if self.unit is None else f" {self.unit}")


def at_least(limit: float, unit: str | None = None) -> Target:
    return Target("at least", limit, unit)


def at_most(limit: float, unit: str | None = None) -> Target:
    return Target("at most", limit, unit)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Values of ours and of the peer, each pair taken right after one another."""

    ours: tuple[float, ...]
    peer: tuple[float, ...]


def interleave(ours: Measure, peer: Measure, repeats: int, *, seconds: float = float("inf")) -> Pairs:
    """Take turns, each side first every other time; stop early once `seconds` are over (after 3)."""
    started = time.perf_counter()
    ours_values: list[float] = []
    peer_values: list[float] = []
    for index in range(repeats):
        if index >= 3 and time.perf_counter() - started > seconds:
            break
        if index % 2:
            peer_values.append(peer())
            ours_values.append(ours())
        else:
            ours_values.append(ours())
            peer_values.append(peer())
    return Pairs(tuple(ours_values), tuple(peer_values))


def tokens_a_second(times: Sequence[Sequence[float]]) -> float:
    """Tokens a second of all replies while all of them were being written; where they never were, in all.

    Each reply by its own clock, from one of its tokens to another: the tokens of a step come to their readers
    one after the other, and a clock in common would cut some of them off at its end.
    """
    start, end = max(each[0] for each in times), min(each[-1] for each in times)
    if end <= start:
        start, end = min(each[0] for each in times), max(each[-1] for each in times)
        return sum(start < at for each in times for at in each) / (end - start)
    within = [[at for at in each if start <= at <= end] for each in times]
    return sum(
        sum(each[0] < at for at in each) / (each[-1] - each[0])
        for each in within
        if each and each[-1] > each[0]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One comparison with its verdict. The ratio is the median over the pairs, not of two medians:
    what slows the machine down for a while slows down both halves of a pair."""

    name: str
    against: str
    unit: str
    gauge: Gauge
    pairs: Pairs
    target: Target
    machine: Machine
    scale: float | None = None
    """Of a growth: how many times larger the one size is. The line then begins with the exponent."""

    @property
    def ours(self) -> float:
        return statistics.median(self.pairs.ours)

    @property
    def peer(self) -> float:
        return statistics.median(self.pairs.peer)

    @property
    def ratios(self) -> list[float]:
        return [self.gauge.ratio(*pair) for pair in zip(self.pairs.ours, self.pairs.peer, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def exponent(self) -> float:
        """With which power of the size the cost grows; 0 where it does not."""
        assert self.scale is not None, "only of a growth"
        return math.log(max(self.ratio, 1e-9)) / math.log(self.scale)

    @property
    def spread(self) -> float:
        """How far the middle half of the ratios lies apart, as a share of their median."""
        if len(self.ratios) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.ratios, n=4, method="inclusive")
        if high == low:
            return 0.0
        return (high - low) / self.ratio if self.ratio else math.inf

    @property
    def ok(self) -> bool:
        return self.target.met(ratio=self.ratio, ours=self.ours)

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "MISS"
        first = _ratio(self.ratio) if self.scale is None else f"n^{self.exponent:.2f}"
        return (
            f"{first:>7}  {self.name}: ours {_number(self.ours)} {self.unit}, "
            f"{self.against} {_number(self.peer)} {self.unit} | {self.target}: {verdict} | "
            f"{self.machine}, {len(self.ratios)} repeats, spread {self.spread:.1%}"
        )

    def to_json(self) -> dict[str, Any]:
        shown = {
            "ratio": self.ratio,
            "ours": self.ours,
            "peer": self.peer,
            "spread": self.spread,
            "ok": self.ok,
        }
        return shown | asdict(self) | {"gauge": self.gauge.value, "line": str(self)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Figure:
        return cls(
            name=value["name"],
            against=value["against"],
            unit=value["unit"],
            gauge=Gauge(value["gauge"]),
            pairs=Pairs(tuple(value["pairs"]["ours"]), tuple(value["pairs"]["peer"])),
            target=Target(**value["target"]),
            machine=Machine(**value["machine"]),
            scale=value.get("scale"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How thorough this run is, and how it measures."""

    quick: bool = False

    def pick(self, full: T, quick: T) -> T:
        return quick if self.quick else full

    def compare(
        self,
        name: str,
        *,
        ours: Measure,
        peer: Measure,
        against: str,
        unit: str,
        gauge: Gauge,
        target: Target,
        repeats: int,
    ) -> Figure:
        """Measure both sides in turns while watching the machine. In a quick run, for a few seconds."""
        with Watch() as watch:
            pairs = interleave(ours, peer, repeats, seconds=self.pick(120.0, 3.0))
        return Figure(
            name=name,
            against=against,
            unit=unit,
            gauge=gauge,
            pairs=pairs,
            target=target,
            machine=watch.machine,
        )


Part = Callable[[Run], Iterable[Figure]]


@dataclass(frozen=True, slots=True)
class Bench:
    """A benchmark: a name, and parts that give figures. Called, it is its own command line."""

    name: str
    parts: Sequence[Part] = field(repr=False)
    check: bool = False
    """Whether a target that is missed is an error, also where `--check` was not given."""

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        return main([self], argv)


def main(benches: Sequence[Bench], argv: Sequence[str] | None = None) -> int:
    """Run `benches` in turn. 1: a part failed, or a target was missed that is checked."""
    names = " ".join(bench.name for bench in benches)
    parser = argparse.ArgumentParser(
        prog="python -m bench" + (f".{names}" if len(benches) == 1 else ""),
        description=f"Measures: {names}. Each line begins with the ratio of ours to the peer.",
    )
    parser.add_argument("--quick", action="store_true", help="a minute for each benchmark, less exact")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE as well")
    parser.add_argument("--only", metavar="PART", help="only the parts with PART in their name")
    options = parser.parse_args(argv)
    run = Run(quick=options.quick)
    results: dict[str, list[Figure]] = {}
    failed: list[str] = []
    for bench in benches:
        print(f"{bench.name}{' (quick)' if run.quick else ''}", flush=True)
        results[bench.name] = list(_measured(bench, run, options.only, failed))
    figures = [figure for each in results.values() for figure in each]
    print(summary(figures, failed), flush=True)
    if options.json:
        options.json.write_text(json.dumps(report(results, quick=run.quick), indent=1) + "\n")
    checked = [bench.name for bench in benches if bench.check or options.check]
    return int(bool(failed) or any(not figure.ok for name in checked for figure in results[name]))


def report(results: dict[str, list[Figure]], *, quick: bool) -> dict[str, Any]:
    """What `--json` writes."""
    return {
        "quick": quick,
        "benches": {name: [figure.to_json() for figure in figures] for name, figures in results.items()},
    }


def summary(figures: Sequence[Figure], failed: Sequence[str] = ()) -> str:
    missed = [figure.name for figure in figures if not figure.ok]
    disturbed = [figure for figure in figures if not figure.machine.idle]
    lines = [f"{len(figures) - len(missed)} of {len(figures)} targets met"]
    if missed:
        lines.append(f"missed: {', '.join(missed)}")
    if failed:
        lines.append(f"FAILED, not measured to the end: {', '.join(failed)}")
    if disturbed:
        worst = max(figure.machine.others for figure in disturbed)
        lines.append(
            f"THE MACHINE WAS NOT IDLE during {len(disturbed)} of {len(figures)} figures: other processes "
            f"used up to {worst:.2f} of {disturbed[0].machine.cores} cores. Take them again on an idle one"
        )
    return "\n".join(lines)


def _measured(bench: Bench, run: Run, only: str | None, failed: list[str]) -> Iterator[Figure]:
    """The figures of a benchmark. A part that fails is added to `failed`, and the next one is measured."""
    for part in bench.parts:
        if only is None or only in part.__name__:
            try:
                for figure in part(run):
                    print(figure, flush=True)
                    yield figure
            except (ModuleNotFoundError, PeerMissingError) as missing:
                print(
                    f"{'':>7}  {part.__name__}: not measured, a peer is not installed ({missing})", flush=True
                )
            except Exception:
                failed.append(f"{bench.name}.{part.__name__}")
                print(f"{'':>7}  {part.__name__}: FAILED\n{traceback.format_exc()}", flush=True)


def _ratio(value: float) -> str:
    return f"{value:.3f}×" if value < 10 else f"{value:.1f}×"


def _number(value: float) -> str:
    """Three digits that mean something."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
