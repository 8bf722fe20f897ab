"""Gates that a test never waits at for ever."""

from __future__ import annotations

from collections.abc import Callable

from decode.observed import Turnstile

_SECONDS = 60.0
_LONGEST = 4096


class PatientTurnstile(Turnstile):
    """Fails where the engine does not come: a reply that has ended reaches no gate."""

    steps: Callable[[], int]
    """How many steps the engine has begun. Whoever opens the runtime says."""

    def write(self, tokens: int) -> None:
        """Have a prompt read and so many tokens of its reply delivered; the engine is held before the next.

        The last token of a prompt and those of a reply each end a step, so only they come one step after
        another.
        """
        self.arrive()
        in_a_row = 0
        for _ in range(_LONGEST):
            before = self.steps()
            self.pass_through(1)
            in_a_row = in_a_row + 1 if self.steps() > before else 0
            if in_a_row == tokens:
                return
        raise AssertionError(f"no {tokens} tokens were written")

    def pass_through(self, tokens: int) -> None:
        self.arrive()
        self.admit(tokens)
        self.arrive()

    def arrive(self) -> None:
        assert self.reached.wait(_SECONDS), "the engine has nothing to do"
