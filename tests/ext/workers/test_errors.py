"""Errors cross from one process to another as they are."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest

from perdure import errors

KINDS = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, errors.PerdureError)
]
VALUES: dict[str, Any] = {
    "Mapping[int, int]": {0: 3},
    "Sequence[str]": ("a", "b"),
    "str": "engine",
    "str | None": "SIGSEGV",
}
"""By how an argument is annotated; the rest are numbers."""


def example(kind: type[errors.PerdureError]) -> errors.PerdureError:
    parameters = inspect.signature(kind.__init__).parameters.values()
    figures = [each for each in parameters if each.kind is each.KEYWORD_ONLY]
    values = {each.name: VALUES.get(each.annotation, index + 7) for index, each in enumerate(figures)}
    return kind("needed 7, 8 fit", **values)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_keeps_its_class_message_and_figures(kind: type[errors.PerdureError]) -> None:
    """H4: what went wrong in the engine's process is raised in this one."""
    error = example(kind)
    error.add_note("a note")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is kind
        assert str(twin) == str(error) == "needed 7, 8 fit"
        assert twin.args == error.args
        assert vars(twin) == vars(error)


def test_some_of_them_have_figures_to_keep() -> None:
    assert {name for kind in KINDS for name in vars(example(kind))} >= {
        "needed",
        "fits",
        "waiting",
        "limit",
        "kept",
        "signal",
        "code",
    }
