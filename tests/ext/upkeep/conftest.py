"""The toy engine, as for tests of sessions."""

from sessions.conftest import toy

__all__ = ["toy"]
