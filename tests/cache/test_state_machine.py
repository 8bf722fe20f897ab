"""Random histories of a whole runtime, on every model, against W≡C."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

import subjects
from perdure.testing.toy import ToyModel
from subjects import Subject

from .state_machine import RuntimeMachine

Find = Callable[[str], Subject]
SLIDING = ("toy-sliding", "gemma3", "mlx-gemma3")
# Only where there is a window does it matter whether it is kept.
WAYS = [(name, full) for name in subjects.NAMES for full in ((True, False) if name in SLIDING else (True,))]
SHORT = [pytest.param(*way, marks=pytest.mark.soak) if way[0] in subjects.SOAKED else way for way in WAYS]
EXAMPLES = 2_000
# The engine rounds a window of 32 up to 256 cells: only past that is anything lost.
PREFIX = {("gemma3", False): 300}


def run(subject: Subject, *, swa_full: bool, examples: int, steps: int, lora: Path) -> None:
    """Look for a history after which warm is not cold."""
    adapters: list[object] = []
    names: dict[str, str] = {}
    if isinstance(subject.model, ToyModel):
        names = {"own": "one.gguf"}
    elif subject.name == "llama":
        names = {"own": str(lora)}
    adapters = [subject.model.adapter(path) for path in names.values()]
    prefix = PREFIX.get((subject.name, swa_full), 0)
    fields = {
        "subject": subject,
        "swa_full": swa_full,
        "prefix": prefix,
        "adapters": adapters,
        "names": names,
        "known": {},
    }
    run_state_machine_as_test(
        type("Machine", (RuntimeMachine,), fields),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


@pytest.mark.parametrize(("name", "swa_full"), SHORT)
def test_no_short_history_of_a_runtime_makes_warm_differ_from_cold(
    name: str, swa_full: bool, find_subject: Find, zoo_path: Callable[[str], Path]
) -> None:
    subject = find_subject(name)
    # Where a window is not kept, much is computed again.
    examples = 40 if subject.toy else 2 if subject.name == "gemma3" and not swa_full else 15
    examples = 3 if name in subjects.MLX else examples
    run(subject, swa_full=swa_full, examples=examples, steps=25, lora=zoo_path("llama-lora"))


@pytest.mark.soak
@pytest.mark.parametrize(("name", "swa_full"), WAYS)
def test_no_long_history_of_a_runtime_makes_warm_differ_from_cold(
    name: str, swa_full: bool, find_subject: Find, zoo_path: Callable[[str], Path]
) -> None:
    examples = -(-EXAMPLES // len(WAYS))
    run(find_subject(name), swa_full=swa_full, examples=examples, steps=50, lora=zoo_path("llama-lora"))
