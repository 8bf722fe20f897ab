"""A device: replies against the library's own loop, state, long prompts, and the server with many clients.

The models are of random weights, written under PERDURE_HOME when they are first needed: 8B (4.5 GB) and a
small one of 135M. On a machine without a GPU the small one alone is measured, on the CPU.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.child import Child
from bench.harness import Bench, Figure, Gauge, Pairs, Run, Target, at_least, at_most, tokens_a_second
from bench.machine import Machine, Watch
from bench.processes.device import tokens
from bench.processes.random_model import EIGHT_BILLION, SMALL, Shape, write
from bench.processes.servers import Clients, built_llama_server, built_url

N_CTX = 512
THREADS = 4
PROMPT = 32
GIB = 1 << 30

# (model, streams): against the library's sampler, and against decoding alone.
_TARGETS: dict[tuple[str, int], tuple[Target, Target]] = {
    ("8B", 64): (at_least(3700, "tok/s"), at_least(0.75)),
    ("8B", 16): (at_least(1.0), at_least(0.9)),
    ("8B", 1): (at_least(1.05), at_least(0.9)),
    ("small", 64): (at_least(8000, "tok/s"), at_least(0.65)),
}
_ANY = (at_least(1.0), at_least(0.5))
_SERVED = {
    ("8B", 64): at_least(3000, "tok/s"),
    ("small", 64): at_least(4000, "tok/s"),
    ("8B", 1): at_least(289, "tok/s"),
}


def replies(run: Run) -> Iterator[Figure]:
    """Tokens a second of replies that are written together."""
    count = run.pick(128, 48)
    for name, path in _models():
        for streams in run.pick((1, 4, 16, 64), (1, 16, 64)):
            prompts = [tokens(PROMPT, seed) for seed in range(streams)]
            with ExitStack() as held:
                sides = [
                    held.enter_context(Child("bench.processes.streams", kind)) for kind in ("ours", "bare")
                ]
                settings = {"path": str(path), "streams": streams, "n_ctx": N_CTX, "threads": THREADS}
                numbers = [side.ask("open", **settings) for side in sides]
                ours, bare = (
                    functools.partial(_rate, side, number, prompts, count)
                    for side, number in zip(sides, numbers, strict=True)
                )
                _ = ours(), bare()
                for against, peer, target in (
                    ("the library's sampler", bare, _TARGETS.get((name, streams), _ANY)[0]),
                    (
                        "decoding alone",
                        functools.partial(
                            sides[1].ask, "floor", number=numbers[1], streams=streams, count=count
                        ),
                        _TARGETS.get((name, streams), _ANY)[1],
                    ),
                ):
                    yield run.compare(
                        f"{name}, {streams} streams",
                        ours=ours,
                        peer=peer,
                        against=against,
                        unit="tok/s",
                        gauge=Gauge.RATE,
                        target=target,
                        repeats=run.pick(5, 3),
                    )


def state(run: Run) -> Iterator[Figure]:
    """Saving, loading, swapping and waking."""
    for name, path in _models()[-1:]:
        length, longer = run.pick((8192, 32_000), (2048, 0)) if name == "8B" else (1024, 0)
        with Child("bench.processes.device") as side, Watch() as watch:
            print(f"   on {side.ask('open', path=str(path))}", flush=True)
            kept = side.ask("save", length=length, repeats=run.pick(5, 3))
            swapped = side.ask("swap", length=length, repeats=3)
            woken = {at: _woken(path, at) for at in (length - 192, *([longer] if longer else []))}
        print(f"   swap {swapped}\n   wake {woken}\n   fork {kept['fork']}", flush=True)
        size = kept["bytes"] / GIB
        figure = functools.partial(_figure, machine=watch.machine)
        about = f"{length} tokens of {name} ({size:.2f} GiB)"
        for what, target in (("save", at_least(5.0, "GiB/s")), ("load", at_least(0.5))):
            ours, peer = ([size / each for each in kept[what][side]] for side in ("ours", "peer"))
            against = "the library into touched memory" if what == "save" else "the library out of it"
            yield figure(f"{what} {about}", against, "GiB/s", Gauge.RATE, ours, peer, target)
        moved = [1e3 * (each - min(swapped["stay"])) for each in swapped["again"]]
        stayed = [1e3 * min(swapped["stay"])] * len(moved)
        yield figure(
            f"swap a slot of {about}", "a turn in place", "ms", Gauge.COST, moved, stayed, at_most(15, "ms")
        )
        for at, found in woken.items():
            target = at_most(0.4, "s") if at < 10_000 else at_least(3.0)
            yield figure(
                f"wake {at} tokens of {name}",
                "computing",
                "s",
                Gauge.COST,
                [found["woken"]],
                [found["cold"]],
                target,
            )


def _woken(path: Path, length: int) -> dict[str, Any]:
    """A prompt that one process computes and another one wakes."""
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = {}
        for step in ("keep", "wake"):
            with Child("bench.processes.device") as side:
                side.ask("open", path=str(path))
                found |= side.ask(step, folder=folder, length=length, n_ctx=length + 256)
    return found


def beside(run: Run) -> Iterator[Figure]:
    """A long prompt beside a running reply."""
    for name, path in _models()[-1:]:
        length = run.pick(8000, 2000) if name == "8B" else 1000
        with Child("bench.processes.device") as side, Watch() as watch:
            side.ask("open", path=str(path))
            found = side.ask("beside", length=length, repeats=run.pick(3, 1))
        figure = functools.partial(_figure, machine=watch.machine)
        about = f"{length} tokens of {name} beside a reply"
        yield figure(about, "alone", "s", Gauge.COST, found["beside"], found["alone"], at_least(0.8))
        worst, median = ([1e3 * each for each in found[kind]] for kind in ("worst", "median"))
        gap = f"worst gap of the reply, {about}"
        yield figure(gap, "its median", "ms", Gauge.COST, worst, median, at_most(80, "ms"))


def served(run: Run) -> Iterator[Figure]:
    """Tokens a second over HTTP, and of llama-server where there is one."""
    count = run.pick(192, 96)
    for name, path in _models():
        for clients in (1, 64):
            with ExitStack() as held, Watch() as watch:
                ours = _heard(_perdure(held, path, clients), clients, count, run.pick(3, 2))
                peer = None
                if built := built_llama_server():
                    there = built_url(held, built, str(path), clients, "-ngl", "999", n_ctx=N_CTX)
                    peer = _heard(there, clients, count, run.pick(3, 2))
            yield _figure(
                f"{name} over HTTP, {clients} clients",
                "llama-server" if peer else "itself",
                "tok/s",
                Gauge.RATE,
                ours,
                peer or ours,
                _SERVED.get((name, clients), at_least(1.0)),
                machine=watch.machine,
            )


def _heard(url: str, clients: int, count: int, repeats: int) -> list[float]:
    """Tokens a second while all clients hear something."""
    found = []
    for number in range(repeats + 1):
        body = {"model": "default", "max_tokens": count, "seed": 7, "logit_bias": {"0": -100, "2": -100}}
        with Clients(urlsplit(url)) as talk:
            started = time.perf_counter()
            for client in range(clients):
                talk.ask({**body, "messages": [{"role": "user", "content": f"Tell {client} {number}"}]})
            offsets = [each - started for each in talk._started]
            while talk.waiting:
                talk.listen()
        pieces = [
            [(at + offset, data.count(b'"content"')) for at, data in came]
            for came, offset in zip(talk.came, offsets, strict=True)
        ]
        if clients > 1 and any(sum(texts for _, texts in each) < count // 2 for each in pieces):
            raise RuntimeError(f"the server answered {talk.came[0][-1][1][-500:]!r}")
        if number:
            found.append(
                tokens_a_second([[at for at, texts in each for _ in range(texts)] for each in pieces])
            )
    return found


def _perdure(held: ExitStack, path: Path, clients: int) -> str:
    """`perdure serve`, as people run it."""
    process = _started(
        held, sys.executable, "-m", "perdure.cli", "serve", str(path), "--port", "0", "--no-store",
        *("--ctx", str(N_CTX), "--slots", str(clients)),
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("address"):
            return line.split()[1]
    raise RuntimeError("perdure serve did not start")


def _started(held: ExitStack, *command: str) -> subprocess.Popen[str]:
    captured_errors = held.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=captured_errors, text=True)
    held.callback(process.communicate)
    held.callback(process.terminate)
    return process


def _rate(side: Child, number: int, prompts: Sequence[Sequence[int]], count: int) -> float:
    """Tokens a second while all streams write."""
    return tokens_a_second(side.ask("write", number=number, prompts=prompts, count=count)["times"])


def _figure(
    name: str,
    against: str,
    unit: str,
    gauge: Gauge,
    ours: Sequence[float],
    peer: Sequence[float],
    target: Target,
    *,
    machine: Machine,
) -> Figure:
    return Figure(
        name=name,
        against=against,
        unit=unit,
        gauge=gauge,
        pairs=Pairs(tuple(ours), tuple(peer)),
        target=target,
        machine=machine,
    )


@functools.cache
def _models() -> list[tuple[str, Path]]:
    """The small model, and where there is a GPU the large one."""
    from perdure.config import settings
    from perdure.engine.llama.native import library

    folder = settings().home / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    wanted: list[tuple[str, Shape]] = [("small", SMALL)]
    if any(device.offloads for device in library.loaded().device_list):
        wanted.append(("8B", EIGHT_BILLION))
    return [(name, write(folder / f"{name}.gguf", shape)) for name, shape in wanted]


main = Bench("gpu", (replies, state, beside, served))


if __name__ == "__main__":
    sys.exit(main())
