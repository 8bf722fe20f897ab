"""Toy models for a child process, and one that does what certain tokens of a prompt tell it to."""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from decode.unexpected import ERRORS, PLACES, plant
from inside import core_of
from perdure import Context, Embedder, Runtime
from perdure import open as open_runtime
from perdure.engine.contract import Batch, Outcome
from perdure.engine.model import EngineModel as AnyModel
from perdure.engine.registry import open_model
from perdure.memory import FullAttention, Hybrid, Recurrent, SlidingWindow
from perdure.restart_policy import RestartPolicy
from perdure.testing.toy import Faults, ToyModel

if TYPE_CHECKING:
    from perdure.ext.workers.remote import RemoteBackend

# Bytes that no text has and that the toy never writes: what happens when one is decoded.
ABORT, SEGFAULT, EXIT, HANG, EAT, HOLD, ABORT_ONCE, DEFECT = 1, 2, 3, 4, 5, 6, 7, 8
# The same, so many tokens later.
LATER = 14
"""Added to one of the above."""
DELAY = 10

FOLDER = "PERDURE_TEST_FOLDER"
"""Where tests and rigged engines meet: two pipes, and a mark that something happened before."""
MODEL = "PERDURE_TEST_MODEL"
"""The file of a model that a rigged engine is made of."""
MEAL = 600 << 20

SENDING = {"sending": "_new_output", "sending a step": "pack_step"}
"""What else the engine thread of a child does, and the function that does it."""

QUICK = RestartPolicy(backoff=0.01, backoff_limit=0.05)


def full() -> ToyModel:
    return ToyModel(FullAttention)


def with_marks() -> ToyModel:
    return ToyModel(marks=["<tool_call>", "</tool_call>"])


def sliding() -> ToyModel:
    return ToyModel(SlidingWindow)


def recurrent() -> ToyModel:
    return ToyModel(Recurrent)


def hybrid() -> ToyModel:
    return ToyModel(Hybrid)


def slow() -> ToyModel:
    return ToyModel(faults=Faults(pace=0.005))


class Reading(ToyModel):
    """Holds whoever has it tokenise a long text."""

    def tokenize(self, text: str, *, special: bool = False, bos: bool = True) -> list[int]:
        if len(text) > 1 << 16:
            act(HOLD)
        return super().tokenize(text, special=special, bos=bos)


class Frozen(ToyModel):
    """Tells how many objects its process has frozen, as the process says that it is ready."""

    @property
    def metadata(self) -> Mapping[str, str]:
        return {**super().metadata, "test.frozen": str(gc.get_freeze_count())}


def frozen() -> ToyModel:
    return Frozen()


def reading() -> ToyModel:
    return Reading()


def short_of_threads() -> ToyModel:
    """In a process that starts no thread while the mark is there."""
    start = threading.Thread.start

    def starved(thread: threading.Thread) -> None:
        if mark().exists():
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = starved  # type: ignore[method-assign, assignment]
    return ToyModel()


def failing() -> ToyModel:
    """In a process where what the mark names fails, once, as the mark says."""

    def wanted(place: str) -> Exception | None:
        if not mark().exists() or mark().read_text().partition(": ")[0] != place:
            return None
        kind = mark().read_text().partition(": ")[2]
        mark().unlink()
        return ERRORS[kind]

    from perdure.ext.workers import service

    for place, (owner, name) in {**PLACES, **{each: (service, SENDING[each]) for each in SENDING}}.items():
        plant(owner, name, functools.partial(wanted, place), setattr)
    return ToyModel()


def telling_limits() -> ToyModel:
    import resource

    mark().write_text(str(resource.getrlimit(resource.RLIMIT_CORE)[0]))
    return ToyModel()


def no_memory() -> ToyModel:
    return ToyModel(faults=Faults(no_memory=True))


def chatty() -> ToyModel:
    logging.getLogger("perdure.chatty").warning("%d words", 2)
    logging.getLogger("perdure.chatty").info("not asked for")
    return ToyModel()


def stillborn() -> ToyModel:
    print("a last word on stdout", flush=True)
    os.abort()


def often_stillborn() -> ToyModel:
    """Starts only where the mark is absent."""
    if mark().exists():
        os._exit(9)
    return rigged()


def changing() -> ToyModel:
    """Another model every time."""
    with mark().open("a") as file:
        file.write("x")
    return ToyModel(seed=mark().stat().st_size)


def dying_at_a_copy() -> AnyModel:
    """A model, a toy unless a file is named, whose engine is killed in a copy while the mark is there."""
    named = os.environ[MODEL]
    model: AnyModel = open_model(Path(named), {}, cells=0) if named else ToyModel()
    make = model.context

    def context(**settings: Any) -> Context:
        made = make(**settings)
        core = core_of(made)
        copy = core.copy

        def dying(src: int, dst: int) -> None:
            copy(src, dst)
            if mark().exists():
                mark().unlink()
                os.kill(os.getpid(), signal.SIGKILL)

        core.copy = dying  # type: ignore[method-assign]
        return made

    # As an object's own, whichever class of model it is.
    vars(model)["context"] = context
    return model


class Rigged(ToyModel):
    """Does what the tokens say, in the middle of a native step."""

    def context(self, **settings: Any) -> Context:
        context = super().context(**settings)
        rig(core_of(context))
        return context

    def embedder(self, **settings: Any) -> Embedder:
        embedder = super().embedder(**settings)
        rig(core_of(embedder))
        return embedder


def rig(core: Any) -> None:
    decode = core.decode
    armed: dict[tuple[int, int], int] = {}

    def rigged_decode(batch: Batch) -> Outcome:
        size = batch.size
        for seq, pos, token in zip(
            batch.seqs[:size].tolist(),
            batch.positions[:size].tolist(),
            batch.tokens[:size].tolist(),
            strict=True,
        ):
            if LATER < token <= LATER + DEFECT:
                armed[seq, pos + DELAY] = token - LATER
            act(armed.pop((seq, pos), token))
        outcome: Outcome = decode(batch)
        return outcome

    core.decode = rigged_decode


def rigged() -> ToyModel:
    return Rigged()


def act(what: int) -> None:
    if what == ABORT:
        os.abort()
    elif what == SEGFAULT:
        ctypes.string_at(0)
    elif what == EXIT:
        os._exit(5)
    elif what == HANG:
        threading.Event().wait()
    elif what == DEFECT:
        raise AssertionError("planted")
    elif what == EAT:
        eaten.append(np.ones(MEAL, np.uint8))
        threading.Event().wait()
    elif what == HOLD:
        # Each opening waits for the other side.
        (folder() / "reached").write_bytes(b"here")
        (folder() / "go").read_bytes()
    elif what == ABORT_ONCE and not mark().exists():
        mark().touch()
        os.abort()


eaten: list[Any] = []


def folder() -> Path:
    return Path(os.environ[FOLDER])


def mark() -> Path:
    return folder() / "mark"


class Hold:
    """The test's side of HOLD."""

    def __init__(self, where: Path) -> None:
        self._where = where
        os.mkfifo(where / "reached")
        os.mkfifo(where / "go")

    def reached(self) -> None:
        """Return when an engine is held in the middle of a step."""
        assert (self._where / "reached").read_bytes() == b"here"

    def go(self) -> None:
        (self._where / "go").write_bytes(b"")


@contextmanager
def meeting_place(where: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hold]:
    monkeypatch.setenv(FOLDER, str(where))
    yield Hold(where)


def isolated(factory: str = "rigged", restart_policy: RestartPolicy = QUICK, **settings: Any) -> Runtime:
    source = f"ext.workers.engines:{factory}"
    return open_runtime(source, isolated=restart_policy, **{"n_ctx": 256, "slots": 2, **settings})


def remote(rt: Runtime) -> RemoteBackend:
    from perdure.ext.workers.remote import RemoteBackend

    assert isinstance(rt.backend, RemoteBackend)
    return rt.backend


def pid(rt: Runtime) -> int:
    """The process that serves now; a restart is waited for."""
    rt.model.tokenize("are you there?")
    found = remote(rt).health().pid
    assert found is not None
    return found
