"""One model on one file of tasks: asked over all slots, written down as it goes, a report at the end.

Each task's outcome is a line of a journal, synced before progress is reported. A run that was killed goes on
behind the last whole line, if model, file and settings are the same. The report is JSON:

    {"model": {…, "sha256": …}, "file": {…, "sha256": …}, "settings": {…}, "metrics": {…}, "tasks": [{…}]}
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from perdure import InvalidInputError, Runtime
from perdure import open as open_runtime
from perdure.ext.evaluation import statistics
from perdure.ext.evaluation.statistics import Interval
from perdure.ext.evaluation.tasks import LARGEST_FILE, WINDOW, Judgement, Task, TaskFile, read_tasks
from perdure.spi.base import atomic_write, check_whole, read_file, settings, system

Progress = Callable[[int, int], None]
_FORMAT = 1
"""Changes with what a line of a journal holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """How one model did on one file."""

    model: Mapping[str, Any]
    file: Mapping[str, Any]
    settings: Mapping[str, Any]
    judgements: tuple[Judgement, ...]
    resumed: int = 0
    """Tasks whose outcome an earlier run had written down."""

    @property
    def logprobs(self) -> list[float]:
        """Those of all tokens that were scored, in order."""
        return [logprob for each in self.judgements for logprob in each.logprobs]

    @property
    def metrics(self) -> dict[str, dict[str, Any]]:
        """Figures by kind of task, each with what it lies between with 95% certainty."""
        metrics: dict[str, dict[str, Any]] = {}
        if logprobs := self.logprobs:
            interval, error = statistics.perplexity(logprobs)
            size = sum(each.text_bytes for each in self.judgements)
            bits = -sum(logprobs) / size / 0.6931471805599453 if size else None
            metrics["perplexity"] = dataclasses.asdict(interval) | {"error": error, "bits_per_byte": bits}
        for kind in dict.fromkeys(each.kind for each in self.judgements if each.right is not None):
            right = [each.right for each in self.judgements if each.kind == kind]
            metrics[kind] = dataclasses.asdict(statistics.share(sum(map(bool, right)), len(right)))
        return metrics

    def report(self) -> dict[str, Any]:
        """Everything as JSON."""
        return {
            "perdure": version("perdure"),
            "model": dict(self.model),
            "file": dict(self.file),
            "settings": dict(self.settings),
            "metrics": self.metrics,
            "tasks": [dataclasses.asdict(each) for each in self.judgements],
        }

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> Evaluation:
        """An evaluation out of its report."""
        try:
            judgements = tuple(
                Judgement(**(each | {"logprobs": tuple(each["logprobs"])})) for each in report["tasks"]
            )
            return cls(
                model=report["model"], file=report["file"], settings=report["settings"], judgements=judgements
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise InvalidInputError(f"this is no report of an evaluation: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """Two evaluations of the same tasks: a figure of each, and how far the second is from the first."""

    kind: str
    first: float
    second: float
    difference: Interval
    """The ratio of perplexities, or the difference of shares."""
    chance: float | None
    """How likely so uneven a difference is between equals; None for perplexity, whose interval says it."""

    @property
    def certain(self) -> bool:
        """Whether they differ with 95% certainty."""
        same = 1.0 if self.kind == "perplexity" else 0.0
        apart = not self.difference.low <= same <= self.difference.high
        return apart and (self.chance is None or self.chance < 0.05)


def evaluate(
    model: str | os.PathLike[str] | Runtime | None,
    file: str | os.PathLike[str],
    *,
    window: int = WINDOW,
    stride: int | None = None,
    slots: int = 4,
    n_ctx: int | None = None,
    threads: int | None = None,
    gpu_layers: int | None = None,
    k_type: str | None = None,
    v_type: str | None = None,
    resume: bool = True,
    progress: Progress | None = None,
) -> Evaluation:
    """How a model does on a file of texts (perplexity) or tasks, a line of JSON each.

    `model` is a file, a name, None for the default one, or a runtime. Perplexity is llama.cpp's own over
    windows of so many tokens; with a `stride` every token of a text counts. What a run that was killed had
    done is not done again, unless `resume` is False.
    """
    check_whole("window", window, 16, 1 << 24)
    if stride is not None:
        check_whole("stride", stride, 1, window - 1)
    check_whole("slots", slots, 1, 256)
    tasks = read_tasks(Path(file))
    with ExitStack() as stack:
        if isinstance(model, Runtime):
            runtime = model
        else:
            runtime = stack.enter_context(
                open_runtime(
                    model,
                    n_ctx=n_ctx or max(window + 8, 4096 if tasks.others else 0),
                    slots=slots,
                    # No two tasks share more than a beginning: state would be kept for nobody.
                    cache=0,
                    threads=threads,
                    gpu_layers=gpu_layers,
                    k_type=k_type,
                    v_type=v_type,
                )
            )
        if tasks.texts and runtime.n_ctx <= window:
            raise InvalidInputError(
                f"a window of {window} tokens needs a context of {window + 1}, this one has {runtime.n_ctx}"
            )
        chosen: dict[str, Any] = {
            "window": window,
            "stride": stride,
            "slots": runtime.slots,
            "n_ctx": runtime.n_ctx,
        }
        chosen |= {"k_type": k_type or "f16", "v_type": v_type or "f16"}
        return _run(runtime, tasks, chosen, resume=resume, progress=progress)


def _run(
    runtime: Runtime, tasks: TaskFile, chosen: Mapping[str, Any], *, resume: bool, progress: Progress | None
) -> Evaluation:
    info = runtime.model.info
    about = {
        "path": str(getattr(runtime.model, "path", "")),
        "name": info.name,
        "quantisation": info.quantisation,
        "bytes": info.nbytes,
        "sha256": runtime.model.digest,
    }
    source = {"path": str(tasks.path), "sha256": tasks.digest}
    questions = list(tasks.tasks(runtime, window=int(chosen["window"]), stride=chosen["stride"]))
    with Journal(_key(runtime.model.digest, tasks.digest, chosen), fresh=not resume) as journal:
        known = journal.read()
        resumed = sum(task.name in known for task in questions)
        waiting = [task for task in questions if task.name not in known]
        if progress:
            progress(resumed, len(questions))
        for judgement in _asked(runtime, waiting):
            journal.add(judgement)
            known[judgement.task] = judgement
            if progress:
                progress(len(known), len(questions))
        journal.remove()
    return Evaluation(
        model=about,
        file=source,
        settings=chosen,
        judgements=tuple(known[task.name] for task in questions),
        resumed=resumed,
    )


def _asked(runtime: Runtime, tasks: Sequence[Task]) -> Iterator[Judgement]:
    """Outcomes as they come, with all slots busy."""
    pool = ThreadPoolExecutor(max_workers=runtime.slots, thread_name_prefix="perdure-eval")
    pending: set[Future[Judgement]] = set()
    left = iter(tasks)
    try:
        while True:
            # One more each than is served: a slot that is free has its next task at hand.
            while len(pending) < 2 * runtime.slots and (task := next(left, None)) is not None:
                pending.add(pool.submit(task.judge, runtime))
            if not pending:
                return
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class Journal:
    """The outcomes of a run, a line each. Always holds: a line that is there whole was synced in order."""

    def __init__(self, key: str, *, fresh: bool) -> None:
        folder = settings().home / "evaluations"
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{key}.jsonl"
        if fresh:
            self.path.unlink(missing_ok=True)
        self._file = open(self.path, "a+b")  # noqa: SIM115

    def read(self) -> dict[str, Judgement]:
        """What an earlier run had done. A line that was cut off by a kill is taken away."""
        self._file.seek(0)
        known: dict[str, Judgement] = {}
        whole = 0
        for line in self._file:
            try:
                if not line.endswith(b"\n"):
                    break
                each = json.loads(line)
                judgement = Judgement(**(each | {"logprobs": tuple(each["logprobs"])}))
            except (ValueError, TypeError, KeyError):
                break
            known[judgement.task] = judgement
            whole += len(line)
        self._file.truncate(whole)
        return known

    def add(self, judgement: Judgement) -> None:
        self._file.write(json.dumps(dataclasses.asdict(judgement)).encode() + b"\n")
        self._file.flush()
        system.sync(self._file.fileno())

    def remove(self) -> None:
        """Nothing is left to go on with."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def _key(model: str, file: str, chosen: Mapping[str, Any]) -> str:
    # How many are served at once changes the last bits, and nothing that is asked.
    decisive = {name: value for name, value in chosen.items() if name not in ("slots", "n_ctx")}
    text = json.dumps([_FORMAT, version("perdure"), model, file, decisive], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def compare(first: Evaluation, second: Evaluation) -> list[PairedDifference]:
    """How two models differ on the same tasks, by kind."""
    if first.file["sha256"] != second.file["sha256"]:
        raise InvalidInputError(
            f"the evaluations are of different files: {first.file['path']} and {second.file['path']}"
        )
    differences = []
    a, b = first.logprobs, second.logprobs
    if a or b:
        windows = [(each.task, len(each.logprobs)) for each in first.judgements if each.logprobs]
        if windows != [(each.task, len(each.logprobs)) for each in second.judgements if each.logprobs]:
            raise InvalidInputError(
                "the texts were cut into other windows of tokens: models with different tokenizers have no "
                "perplexity in common; compare bits_per_byte of the reports"
            )
        ratio = statistics.perplexity_ratio(a, b)
        values = [statistics.perplexity(each)[0].value for each in (a, b)]
        differences.append(
            PairedDifference(
                kind="perplexity", first=values[0], second=values[1], difference=ratio, chance=None
            )
        )
    for kind in dict.fromkeys(each.kind for each in first.judgements if each.right is not None):
        answers = [
            {each.task: bool(each.right) for each in one.judgements if each.kind == kind}
            for one in (first, second)
        ]
        both = [task for task in answers[0] if task in answers[1]]
        ours, theirs = ([table[task] for task in both] for table in answers)
        if not both:
            continue
        differences.append(
            PairedDifference(
                kind=kind,
                first=sum(ours) / len(both),
                second=sum(theirs) / len(both),
                difference=statistics.share_difference(ours, theirs),
                chance=statistics.sign_test(ours, theirs),
            )
        )
    return differences


def write_report(evaluation: Evaluation, path: Path) -> None:
    """Write a report. The file appears when it is whole."""
    with atomic_write(path) as file:
        file.write(json.dumps(evaluation.report(), indent=1).encode())


def read_report(path: Path) -> Evaluation:
    """An evaluation out of the file of its report."""
    try:
        report = json.loads(read_file(path, LARGEST_FILE, regular=False))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"{path} is no report of an evaluation: {error}") from None
    if not isinstance(report, dict):
        raise InvalidInputError(f"{path} is no report of an evaluation")
    return Evaluation.of(report)
