"""The samples of one request."""

from __future__ import annotations

from dataclasses import dataclass

from perdure.decode.job import Outbox
from perdure.decode.run import Run
from perdure.engine.state import Checkpoint


@dataclass(slots=True, eq=False)
class Group:
    """The first sample reads the prompt; the others start where it ends, in sequences of their own.

    A sample that finds no free sequence waits for one of its siblings': none is left without a sequence
    while a sibling has one, so the last to finish leaves nobody behind.
    """

    outbox: Outbox
    runs: list[Run]
    deadline: float | None
    cancelled: bool = False
    checkpoint: Checkpoint | None = None

    @property
    def done(self) -> bool:
        return all(run.done for run in self.runs)

    @property
    def waiting(self) -> list[Run]:
        return [run for run in self.runs if run.seq is None and not run.done]

    @property
    def placed(self) -> int:
        """How many sequences it has."""
        return sum(run.seq is not None for run in self.runs)

    def cancel(self) -> None:
        for run in self.runs:
            if not run.done:
                run.finish("cancelled")

    def fail(self, run: Run, error: Exception) -> None:
        """End `run` by an error. While it still reads the prompt, that is the error of all samples."""
        for each in [run] if run.written else self.runs:
            if not each.done:
                each.finish("error", error=error)

    def deliver(self) -> None:
        self.outbox.finish([run.reply() for run in self.runs])
