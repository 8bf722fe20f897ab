"""Tuning: the settings with which a model is fastest on this machine, measured in a minute and remembered.

    {"<digest of the model>|<machine>": {"threads": 8, "n_batch": 256, …},
     "placement|<digest of the model>|<machine>": {"cpu_experts": "all"}}

A reply is what people wait for, so threads and the K/V type are chosen by the speed of a reply, and the size
of a step by the speed of a prompt. A setting replaces the usual one only where it is clearly faster. Where a
model computes is found first: on a GPU as far as it fits, with all experts on the CPU, or on the CPU alone.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, Unpack

from perdure import InvalidInputError, OutOfMemoryError
from perdure.ext.fit import kv_loss
from perdure.spi.base import N_BATCH, EngineConfig, read_table, system, write_table
from perdure.spi.engine import Advisor, ContextKeywords, EngineModel, LoadingKeywords, remembered

SECONDS = 60.0
CLEARLY = 1.05
"""How many times as fast another setting must be to take the place of the usual one."""
_BATCHES = (N_BATCH, 256, 128)
_PROMPT = 256
_REPLY = 24
_DEPTH = 2048
"""Tokens behind which K/V types are compared: before that their speed hardly matters."""
_lock = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The settings that were fastest, and how fast."""

    config: EngineConfig
    """Threads, tokens of a step, and the types of K and V."""
    prompt: float
    """Tokens a second of a prompt."""
    reply: float
    """Tokens a second of a reply."""

    def to_json(self) -> dict[str, Any]:
        return {**self.config.context, "prompt": self.prompt, "reply": self.reply}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Tuning:
        """TypeError, KeyError or InvalidInputError where it is none."""
        settings = {name: value for name, value in entry.items() if name not in ("prompt", "reply")}
        return cls(config=EngineConfig(**settings), prompt=entry["prompt"], reply=entry["reply"])


@dataclass(frozen=True, slots=True)
class Trial:
    """One setting that was tried: tokens a second of a reply and of a prompt."""

    what: str
    reply: float
    prompt: float


def tune(
    model: EngineModel, *, seconds: float = SECONDS, progress: Callable[[Trial], None] | None = None
) -> Tuning:
    """Try settings for about so many seconds, remember the best, and give it.

    Where the time is over, what was not tried stays as usual.
    """
    if not 0 < seconds <= 3600:
        raise InvalidInputError(f"seconds is from above 0 to 3600, got {seconds}")
    ends = time.monotonic() + seconds
    cores = system.usable_cores()

    def tried(what: str, **context: Unpack[ContextKeywords]) -> Trial:
        trial = Trial(what, *_speeds(model, context))
        if progress is not None:
            progress(trial)
        return trial

    threads, best = cores, tried(f"{cores} threads", threads=cores)
    for count in _fewer(cores):
        if time.monotonic() > ends:
            break
        trial = tried(f"{count} threads", threads=count)
        if trial.reply > CLEARLY * best.reply:
            threads, best = count, trial
    n_batch = N_BATCH
    for size in _BATCHES[1:]:
        if time.monotonic() > ends:
            break
        trial = tried(f"steps of {size} tokens", threads=threads, n_batch=size)
        if trial.prompt > CLEARLY * best.prompt:
            n_batch, best = size, dataclasses.replace(best, prompt=trial.prompt)
    kind = "f16"
    if time.monotonic() < ends and _is_worth_a_smaller_type(model, threads, progress):
        kind = "q8_0"
    config = EngineConfig(threads=threads, n_batch=n_batch, kv_type=kind)
    tuning = Tuning(config=config, prompt=best.prompt, reply=best.reply)
    remember(model, tuning)
    return tuning


_ALL_EXPERTS: LoadingKeywords = {"cpu_experts": "all"}
_NO_GPU: LoadingKeywords = {"gpu_layers": 0}


def place(
    load: Callable[[LoadingKeywords], EngineModel],
    *,
    seconds: float = SECONDS,
    progress: Callable[[Trial], None] | None = None,
) -> LoadingKeywords:
    """Where a model's layers and experts compute fastest, as keywords to load it with; none: as usual.

    `load` opens it with such keywords. It is loaded once for each place that is tried, for about so many
    seconds in all. The result is remembered. Every place that is tried fits wherever the usual one does.
    """
    ends = time.monotonic() + seconds
    with closing(load({})) as model:
        # Without a GPU there is one place.
        if not model.gpu_layers:
            return {}
        digest, experts_move = model.digest, model.experts_on_gpu
        best = _placed("as much on the GPU as fits", model, progress)
    chosen: LoadingKeywords = {}
    for what, keywords in (("all experts on the CPU", _ALL_EXPERTS), ("the CPU alone", _NO_GPU)):
        if time.monotonic() > ends:
            break
        if keywords is _ALL_EXPERTS and not experts_move:
            continue
        with closing(load(keywords)) as model:
            trial = _placed(what, model, progress)
        if trial.reply > CLEARLY * best.reply:
            chosen, best = keywords, trial
    _write(_place_key(digest), dict(chosen) or None)
    return chosen


def _placed(what: str, model: EngineModel, progress: Callable[[Trial], None] | None) -> Trial:
    trial = Trial(what, *_speeds(model, {}))
    if progress is not None:
        progress(trial)
    return trial


def recall_place(digest: Callable[[], str]) -> LoadingKeywords:
    """What was remembered for a model on this machine. `digest` is asked only where something was."""
    known = read_table(remembered())
    if not any(key.startswith(_PLACEMENT) for key in known):
        return {}
    place = known.get(_place_key(digest()))
    return next((each for each in (_ALL_EXPERTS, _NO_GPU) if each == place), LoadingKeywords())


def recall(model: EngineModel) -> Tuning | None:
    """What was remembered for this model on this machine."""
    # The digest of a large file takes long.
    known = read_table(remembered())
    entry: Any = known.get(_key(model)) if known else None
    with suppress(TypeError, AttributeError, KeyError, InvalidInputError):
        return Tuning.from_json(entry)
    return None


def remember(model: EngineModel, tuning: Tuning) -> None:
    _write(_key(model), tuning.to_json())


def forget(model: EngineModel) -> None:
    """Open this model as usual again."""
    _write(_key(model), None)
    _write(_place_key(model.digest), None)


def tuned(model: EngineModel, config: EngineConfig) -> EngineConfig:
    """What a model is opened with, with what was tuned for those that nobody chose."""
    tuning = recall(model)
    if tuning is None:
        return config
    found = tuning.config.without_kv_type() if config.flash is False else tuning.config
    return found.overlaid(config)


def _fewer(cores: int) -> Iterator[int]:
    """Numbers of threads below that of the cores, each about half of the one before."""
    while cores > 1:
        cores = (cores + 1) // 2
        yield cores


def _speeds(model: EngineModel, context: Mapping[str, Any]) -> tuple[float, float]:
    ids = model.tokenize(kv_loss.TEXT)
    ids = (ids * (_PROMPT // max(1, len(ids)) + 1))[:_PROMPT]
    with model.context(n_ctx=_PROMPT + _REPLY + 2, n_seq=1, **context) as opened:
        # The first step of a graph is slower than all others.
        opened.decode(ids[:8])
        opened.clear()
        started = time.perf_counter()
        opened.decode(ids)
        opened.synchronize()
        prompt = _PROMPT / (time.perf_counter() - started)
        started = time.perf_counter()
        for _ in range(_REPLY):
            opened.decode([int(opened.logits().argmax())])
        opened.synchronize()
        return _REPLY / (time.perf_counter() - started), prompt


def _is_worth_a_smaller_type(
    model: EngineModel, threads: int, progress: Callable[[Trial], None] | None
) -> bool:
    """Whether K/V in q8_0 makes long replies clearly faster, and costs this model little."""
    speeds = []
    try:
        for kind in ("f16", "q8_0"):
            speeds.append(kv_loss.speed(model, kind, kind, _DEPTH, threads=threads))
            if progress is not None:
                progress(Trial(f"K/V in {kind} behind {_DEPTH:,} tokens", speeds[-1], 0.0))
        if speeds[1] <= CLEARLY * speeds[0]:
            return False
        kv_loss.check_kv_type(model, EngineConfig(kv_type="q8_0", threads=threads))
    except (InvalidInputError, OutOfMemoryError):
        # A model that does not take the type, or loses much by it.
        return False
    return True


def _key(model: EngineModel) -> str:
    """A model on a machine: its processor, its cores, and where the model's layers are."""
    machine = f"{system.architecture()}, {system.usable_cores()} cores"
    return f"{model.digest}|{machine}, {model.gpu_layers} layers on a GPU"


_PLACEMENT = "placement|"


def _place_key(digest: str) -> str:
    return f"{_PLACEMENT}{digest}|{system.architecture()}, {system.usable_cores()} cores"


def _write(key: str, value: dict[str, Any] | None) -> None:
    with _lock:
        known = read_table(remembered())
        known.pop(key, None)
        if value is not None:
            known[key] = value
        write_table(remembered(), known)


class MeasuredAdvice(Advisor):
    """What was measured here, for later openings of the model."""

    loading = staticmethod(recall_place)
    tuned = staticmethod(tuned)
    check_kv_type = staticmethod(kv_loss.check_kv_type)


ADVISOR = MeasuredAdvice()
