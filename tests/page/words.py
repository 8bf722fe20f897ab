"""A toy that writes words: replies are of a known length, and no text in them is Markdown."""

from __future__ import annotations

from typing import Any

import perdure
from decode.observed import trouble
from page.gates import PatientTurnstile
from perdure import Runtime
from perdure.testing.toy import Faults, ToyModel

REPLY = 24
"""Tokens of a reply, each a small letter or a space."""


def open_words(*, gate: PatientTurnstile | None = None, **settings: Any) -> Runtime:
    """A runtime whose steps wait at the `gate`."""
    model = ToyModel(faults=Faults(gate=gate), reply_tokens=REPLY)
    runtime = perdure.open(model, **{"n_ctx": 2048, "slots": 3, "stall": 0, **settings})
    if gate is not None:
        gate.steps = lambda: trouble(runtime).n_decodes
    return runtime
