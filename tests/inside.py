"""What a runtime is made of, for tests that look inside."""

from __future__ import annotations

from perdure import Runtime
from perdure.backend import LocalBackend
from perdure.engine.context import Context
from perdure.engine.contract import Core


def inside(rt: Runtime) -> LocalBackend:
    assert isinstance(rt.backend, LocalBackend)
    return rt.backend


def core_of(context: Context) -> Core:
    """The engine below a context: a test plants its faults there, and reads back what is truly cached."""
    return context._core
