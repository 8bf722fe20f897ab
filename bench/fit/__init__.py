"""Fit: the memory that `perdure.fit` predicts, against what the engine really takes.

    python -m bench.fit [MODEL …]

Without models: toys of each kind of memory, the default model, and on a GPU the 8B of random weights and a
mixture of experts. What is really taken are the buffers that the library reports while it loads. What the
library copies out of a mapped file into a layout for this CPU counts once: the system can drop those pages of
the file at any time. Each line has the prediction, the truth and their ratio; the exit code is 1 where one is
off by more than 5%.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.processes.random_model import EIGHT_BILLION, MIXTURE, write
from perdure import Model, models
from perdure.engine.llama.native import library
from perdure.engine_config import KvType
from perdure.models.placement import ModelPlacement, Sizes

BOUND = 0.05
SETUPS = (
    ModelPlacement(n_ctx=4096, slots=4),
    ModelPlacement(n_ctx=16384, slots=1),
    ModelPlacement(n_ctx=4096, slots=2, kv=KvType("q8_0", "q8_0")),
    ModelPlacement(n_ctx=8192, slots=2, n_batch=128),
    ModelPlacement(n_ctx=2048, slots=8, kv=KvType("q8_0")),
    ModelPlacement(n_ctx=4096, slots=1, flash=False),
)
_BUFFER = re.compile(r"(\S+)\s+(model|KV|RS|output|compute) buffer size =\s*([\d.]+) MiB")
_HOST = re.compile(r"CPU|Host|AMX")
_MAPPED = re.compile(r"Mapped")
_COPIED = re.compile(r"AMX|REPACK")


class Buffers(logging.Handler):
    """The buffers that the library reports, in bytes, apart by whose memory they are in."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.device = 0.0
        self._own = 0.0
        self._mapped = 0.0
        self._copied = 0.0

    @property
    def machine(self) -> float:
        """In the machine's memory, without those pages of the file that were copied."""
        return self._own + self._copied + max(0.0, self._mapped - self._copied)

    def emit(self, record: logging.LogRecord) -> None:
        if found := _BUFFER.search(record.getMessage()):
            size = float(found[3]) * 2**20
            if not _HOST.search(found[1]):
                self.device += size
            elif _MAPPED.search(found[1]):
                self._mapped += size
            elif _COPIED.search(found[1]):
                self._copied += size
            else:
                self._own += size


@contextmanager
def reported() -> Iterator[Buffers]:
    """The buffers of what is opened meanwhile."""
    log = logging.getLogger("perdure.llama")
    handler, level = Buffers(), log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        yield handler
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What was predicted for one way to open a model, and what it took, in bytes."""

    model: str
    setup: ModelPlacement
    predicted: tuple[int, int]
    real: tuple[float, float]

    @property
    def ratio(self) -> float:
        """Predicted to real, of the place where it is further off and that has a tenth of the whole."""
        whole = sum(self.real)
        ratios = [
            ours / truth for ours, truth in zip(self.predicted, self.real, strict=True) if truth > whole / 10
        ]
        return max(ratios, key=lambda ratio: abs(ratio - 1))

    @property
    def ok(self) -> bool:
        return abs(self.ratio - 1) <= BOUND

    def __str__(self) -> str:
        places = ", ".join(
            f"{place} {ours / 2**20:,.1f} MiB predicted, {truth / 2**20:,.1f} taken"
            for place, ours, truth in zip(("machine", "device"), self.predicted, self.real, strict=True)
            if ours or truth
        )
        setup = self.setup
        about = f"{setup.n_ctx} x {setup.slots}, {setup.kv}, steps of {setup.n_batch}"
        about += "" if setup.flash else ", plain attention"
        about += f", {setup.gpu_layers} layers on the GPU" if setup.gpu_layers else ""
        about += f", experts of {setup.cpu_experts} layers here" if setup.cpu_experts else ""
        return f"{self.ratio:>6.3f}  {self.model}: {about} | {places} | {'ok' if self.ok else 'MISS'}"


def compare(path: Path, setup: ModelPlacement) -> Comparison:
    """Open a model so, and hold what it takes against the prediction."""
    sizes = Sizes.of(models.read_parts(path))
    with reported() as buffers:
        model = Model(
            path,
            gpu_layers=setup.gpu_layers,
            cells=1,
            kv_offload=setup.kv_offload,
            cpu_experts=setup.cpu_experts,
        )
        context = model.context(
            n_ctx=setup.n_ctx,
            n_seq=setup.slots,
            n_batch=setup.n_batch,
            kv_type=str(setup.kv),
            flash=setup.flash,
            threads=1,
        )
    context.close()
    model.close()
    return Comparison(
        model=path.stem,
        setup=setup,
        predicted=(sizes.machine(setup).total, sizes.device(setup).total),
        real=(buffers.machine, buffers.device),
    )


def cases(path: Path) -> Iterator[ModelPlacement]:
    """The setups to try a model with: on a GPU with all layers, half of them, and with experts here."""
    sizes = Sizes.of(models.read_parts(path))
    gpu = any(device.offloads for device in library.loaded().device_list)
    for setup in SETUPS:
        # MLA keeps no V cache, and takes no other type for it.
        if setup.kv.k != setup.kv.v and any(k and not v for k, v in sizes.cache):
            continue
        yield setup
        if gpu:
            yield dataclasses.replace(setup, gpu_layers=sizes.all_layers)
    if gpu:
        first = SETUPS[0]
        yield dataclasses.replace(first, gpu_layers=sizes.all_layers // 2)
        yield dataclasses.replace(first, gpu_layers=sizes.all_layers, kv_offload=False)
        if any(sizes.experts):
            for count in (len(sizes.layers) // 2, len(sizes.layers)):
                yield dataclasses.replace(first, gpu_layers=sizes.all_layers, cpu_experts=count)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fit", description=__doc__)
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL", help="files to try")
    parser.add_argument("--quick", action="store_true", help="two setups a model")
    options = parser.parse_args(argv)
    logging.getLogger("perdure.engine").setLevel(logging.ERROR)
    missed = count = 0
    with tempfile.TemporaryDirectory() as folder:
        for path in options.models or _usual(Path(folder)):
            for setup in list(cases(path))[: 2 if options.quick else None]:
                found = compare(path, setup)
                print(found, flush=True)
                count += 1
                missed += not found.ok
    print(f"{count - missed} of {count} within {BOUND:.0%}")
    return int(missed > 0)


def _usual(folder: Path) -> Iterator[Path]:
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    import zoo

    for name in zoo.names():
        yield zoo.write(name, folder)
    yield models.path()
    if any(device.offloads for device in library.loaded().device_list):
        yield write(folder / "8B.gguf", EIGHT_BILLION)
        yield write(folder / "experts.gguf", MIXTURE)
