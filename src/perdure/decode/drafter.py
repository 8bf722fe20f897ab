"""The contract of a drafter, which guesses the next tokens of replies, and of what opens one.

A drafter puts guesses into the chunks of a step (`Chunk.draft`). The executor computes them in that step,
draws each token from the row behind the one before, as if nothing had been guessed, and keeps those that were
right. So a guess changes how long a reply takes, and never what it is. All calls are made in the engine
thread, between two steps; only a drafter's own model may be waited for. What a drafter raises is logged, and
it is not asked again. A guess beyond what the step, the reply or the context has room for is cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from perdure.decode.scheduler import Budget, Step
from perdure.decode.sequence import TokenSequence
from perdure.engine.context import Context
from perdure.engine.model import EngineModel
from perdure.engine_config import EngineConfig
from perdure.extension import brought


class Drafter(Protocol):
    """Proposes tokens for steps."""

    def propose(self, step: Step, budget: Budget) -> None:
        """Put guesses into chunks that take them (`Chunk.takes_guesses`), as their requests ask
        (`Request.speculate`)."""
        ...

    def observe(self, step: Step, seconds: float) -> None:
        """That step was computed and drawn from, in so many seconds."""
        ...

    def forget(self, sequence: TokenSequence) -> None:
        """The sequence has ended."""
        ...

    def close(self) -> None: ...


class DrafterOpener(Protocol):
    """What an extension brings: opens a drafter for a context."""

    def context_options(
        self, model: EngineModel, config: EngineConfig
    ) -> AbstractContextManager[Mapping[str, Any]]:
        """Further options of `Model.context`, for a context that the drafter reads from. What they hold is
        needed until the block ends."""
        ...

    def open(self, model: EngineModel, context: Context, config: EngineConfig) -> Drafter: ...


def drafter_opener() -> DrafterOpener | None:
    """That of the first extension that brings one."""
    return next(brought("drafters"), None)
