"""The models that promises are tested on, each opened once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import perdure
from perdure import Model, models
from promises.kinds import KINDS, Kind


@pytest.fixture(scope="session")
def open_model(zoo_path: Callable[[str], Path]) -> Callable[[str], Model]:
    """`open_model("gemma3")` is that toy model."""
    known: dict[str, Model] = {}

    def find(name: str) -> Model:
        if name not in known:
            known[name] = Model(zoo_path(name))
        return known[name]

    return find


@pytest.fixture(scope="session")
def llama(open_model: Callable[[str], Model]) -> Model:
    return open_model("llama")


@pytest.fixture(scope="session")
def real_model() -> Model:
    """The default model, fetched if it is not here."""
    return perdure.Model(models.path())


@pytest.fixture(params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> Kind:
    assert isinstance(request.param, Kind)
    return request.param


@pytest.fixture
def model(kind: Kind, open_model: Callable[[str], Model]) -> Model:
    """The model of `kind`."""
    return open_model(kind.name)
