"""Images: the tokens that are computed and the images that are encoded for a browser agent of 40 screenshots,
with three forks, a subagent, a kill of everything, and a switch to another model and back; on toy models with
plain positions, with M-RoPE and with a recurrent state. llama-server has the same trace.

What is counted is work, which is the same however busy a machine is. The seconds are of toys: starts of
processes are most of them.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.child import ROOT, Child
from bench.harness import Bench, Figure, Gauge, Run, at_least, at_most
from bench.images import devices
from bench.images.trace import Ask, trace

KINDS = {"llava": "plain positions", "qwen2vl": "M-RoPE", "qwen35": "a hybrid"}
_OTHER = "idefics3"
"""The model that is asked in between."""


@dataclass
class Work:
    """What the trace cost."""

    computed: int = 0
    new: int = 0
    """Tokens of prompts behind what the conversation had by then."""
    encoded: int = 0
    seconds: float = 0.0


def images(run: Run) -> Iterator[Figure]:
    """Tokens, encodings and seconds of the trace."""
    asks = trace(run.pick(40, 8))
    distinct = len({ask.image for ask in asks} - {None})
    with tempfile.TemporaryDirectory() as folder:
        for kind, name in KINDS.items():
            ours, theirs = (walk(side, kind, asks, Path(folder)) for side in ("perdure", "llama-server"))
            for what, one, other, against, target in (
                ("tokens computed", ours.computed, ours.new, "those that are new", at_most(1.1)),
                ("tokens computed", ours.computed, theirs.computed, "llama-server", at_most(1)),
                ("images encoded", ours.encoded, distinct, "screenshots", at_most(1)),
                ("images encoded", ours.encoded, theirs.encoded, "llama-server", at_most(1)),
            ):
                yield run.compare(
                    f"{what}, {name}",
                    ours=lambda one=one: float(one),  # type: ignore[misc]
                    peer=lambda other=other: float(other),  # type: ignore[misc]
                    against=against,
                    unit=what.split()[0],
                    gauge=Gauge.RATE,
                    target=target,
                    repeats=1,
                )
            yield run.compare(
                f"seconds, {name}",
                ours=lambda: ours.seconds,  # noqa: B023 - called at once
                peer=lambda: theirs.seconds,  # noqa: B023
                against="llama-server",
                unit="s",
                gauge=Gauge.COST,
                target=at_least(0.5),
                repeats=1,
            )


def plain_turns(run: Run) -> Iterator[Figure]:
    """A reply without images costs what it did before images were taken: with the extension that reads them,
    behind an image of another conversation, against perdure where that extension is hidden."""
    hidden = {"PERDURE_HIDDEN": "images", "PYTHONPATH": str(ROOT / "tests" / "hiding")}
    with tempfile.TemporaryDirectory() as folder:
        files = toy("llava", Path(folder))
        with (
            Child("bench.images.side", "counted") as ours,
            Child("bench.images.side", "counted", env=hidden) as peer,
        ):
            for child, name in ((ours, "with"), (peer, "without")):
                child.ask("open", store=str(Path(folder) / name), **files)
            ours.ask("ask", conversation="other", text="w1", image=1, fork_of="")
            yield run.compare(
                "calls of functions for a token",
                ours=lambda: float(ours.ask("calls")),
                peer=lambda: float(peer.ask("calls")),
                against="images hidden",
                unit="calls",
                gauge=Gauge.COST,
                target=at_least(0.99),
                repeats=3,
            )


def walk(side: str, kind: str, asks: Sequence[Ask], folder: Path) -> Work:
    """The trace on one side, from nothing."""
    work, known = Work(), dict[str, int]()
    with tempfile.TemporaryDirectory(dir=folder) as store:
        files = {each: toy(each, folder) for each in (kind, _OTHER)}
        began = time.monotonic()
        child = started(side, files[kind], store)
        try:
            for ask in asks:
                if ask.before:
                    child = between(child, side, ask.before, files[kind], files[_OTHER], store, work)
                answer = child.ask(
                    "ask",
                    conversation=ask.conversation,
                    text=ask.text,
                    image=ask.image,
                    fork_of=ask.fork_of,
                )
                work.computed += answer["computed"]
                work.new += answer["prompt"] - known.get(ask.fork_of or ask.conversation, 0)
                known[ask.conversation] = answer["prompt"] + answer["written"]
            work.encoded += child.ask("encoded")
        finally:
            child.__exit__(None, None, None)
        work.seconds = time.monotonic() - began
    return work


def between(
    child: Child, side: str, what: str, own: dict[str, str], other: dict[str, str], store: str, work: Work
) -> Child:
    """Kill everything, or ask another model; then the first one is there again."""
    said: Any = None
    if side == "llama-server":
        # It has one model for as long as it lives.
        said = child.ask("said")
    elif what == "switch":
        child.ask("open", store=store, **other)
        child.ask("ask", conversation="other", text="w1", image=1, fork_of="")
        child.ask("open", store=store, **own)
        # The other model has another encoder, which sees this one for the first time.
        work.encoded -= 1
        return child
    work.encoded += child.ask("encoded")
    child.__exit__(None, None, None)
    if what == "switch":
        child = started(side, other, store)
        child.ask("ask", conversation="other", text="w1", image=1, fork_of="")
        child.__exit__(None, None, None)
    child = started(side, own, store)
    if said is not None:
        child.ask("remember", said=said)
    return child


def started(side: str, files: dict[str, str], store: str) -> Child:
    child = Child("bench.images.side", side).__enter__()
    try:
        child.ask("open", store=store, **files)
    except BaseException:
        with suppress(Exception):
            child.__exit__(None, None, None)
        raise
    return child


def toy(kind: str, folder: Path) -> dict[str, str]:
    """A model of the tests, and its projector."""
    place = folder / kind
    place.mkdir(exist_ok=True)
    model, projector = toys().write(place, kind)
    return {"model": str(model), "projector": str(projector)}


def toys() -> ModuleType:
    """What writes the models of the tests."""
    sys.path.insert(0, str(ROOT / "tests"))
    try:
        return importlib.import_module("ext.images.toys")
    finally:
        sys.path.remove(str(ROOT / "tests"))


def on_devices(run: Run) -> Iterator[Figure]:
    """The encoder on a GPU beside the same on all cores; nothing where there is no GPU."""
    yield from devices.devices(run, toys)


main = Bench("images", (plain_turns, images, on_devices))
