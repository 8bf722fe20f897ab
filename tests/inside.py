"""What a runtime is made of, for tests that look inside."""

from __future__ import annotations

from perdure import Runtime
from perdure.backend import LocalBackend


def inside(rt: Runtime) -> LocalBackend:
    assert isinstance(rt.backend, LocalBackend)
    return rt.backend
