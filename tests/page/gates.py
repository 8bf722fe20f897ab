"""Gates that a test never waits at for ever."""

from __future__ import annotations

from decode.observed import Turnstile

_SECONDS = 60.0


class PatientTurnstile(Turnstile):
    """Fails where the engine does not come: a reply that has ended reaches no gate."""

    def pass_through(self, tokens: int) -> None:
        self.arrive()
        self.admit(tokens)
        self.arrive()

    def arrive(self) -> None:
        assert self.reached.wait(_SECONDS), "the engine has nothing to do"
