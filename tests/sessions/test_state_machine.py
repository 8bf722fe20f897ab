"""W≡C over the life of a store: sleep, kill, wake, restart, export and import among everything else."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import subjects
from perdure import CorruptStateError
from perdure.sessions import turn as turn_module
from perdure.sessions.store.sqlite.store import SqliteStore
from sessions.state_machine import life
from subjects import NAMES, Subject


def live(
    subject: Subject, examples: int, steps: int, phases: Sequence[Phase] = tuple(Phase), **options: object
) -> None:
    run_state_machine_as_test(
        life(subject, **options),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            phases=phases,
            derandomize=phases == [Phase.generate] or examples < 50,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("name", subjects.every(NAMES))
def test_whatever_happens_sessions_go_on_as_fresh_ones_would(
    name: str, zoo_path: Callable[[str], Path]
) -> None:
    toy = name.startswith("toy")
    live(subjects.find(name, zoo_path), examples=8 if toy else 2, steps=25 if toy else 12)


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_for_long(name: str, zoo_path: Callable[[str], Path]) -> None:
    live(subjects.find(name, zoo_path), examples=200 if name.startswith("toy") else 30, steps=50)


def test_a_turn_that_is_lost_is_seen(
    zoo_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: turns that are written, but to which the session does not lead."""
    monkeypatch.setattr(SqliteStore, "_move", lambda self, row, at: None)
    with pytest.raises(AssertionError):
        live(subjects.find("toy-full", zoo_path), examples=400, steps=30, phases=[Phase.generate])


def test_tokens_that_are_not_those_of_the_text_are_seen(
    zoo_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: turns that go on from a token too few."""
    shorten = turn_module.shorten

    def short(parts: list[Any], by: int) -> None:
        shorten(parts, by + 1 if parts and isinstance(parts[-1], array) else by)

    monkeypatch.setattr(turn_module, "shorten", short)
    with pytest.raises((AssertionError, CorruptStateError)):
        live(subjects.find("toy-full", zoo_path), examples=400, steps=30, phases=[Phase.generate])
