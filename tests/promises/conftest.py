"""The models that promises are tested on, each opened once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import perdure
import subjects
from perdure import Model, models
from perdure.engine import registry
from promises.kinds import KINDS, MLX, Kind, every


@pytest.fixture(scope="session")
def open_model(zoo_path: Callable[[str], Path]) -> Callable[[str], Model]:
    """`open_model("gemma3")` is that toy model."""
    known: dict[str, Model] = {}

    def find(name: str) -> Model:
        if name not in known:
            path = zoo_path(name)
            known[name] = (
                registry.open_model(path, {}, cells=0) if name in subjects.MLX else Model(path)  # type: ignore[assignment]
            )
        return known[name]

    return find


@pytest.fixture(scope="session")
def llama(open_model: Callable[[str], Model]) -> Model:
    return open_model("llama")


@pytest.fixture(scope="session")
def real_model() -> Model:
    """The default model, fetched if it is not here."""
    return perdure.Model(models.path())


@pytest.fixture(params=every((*KINDS, *MLX)))
def kind(request: pytest.FixtureRequest) -> Kind:
    assert isinstance(request.param, Kind)
    return request.param


@pytest.fixture
def model(kind: Kind, open_model: Callable[[str], Model]) -> Model:
    """The model of `kind`."""
    return open_model(kind.name)
