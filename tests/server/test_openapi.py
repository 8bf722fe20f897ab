"""The OpenAPI document is true: schemathesis asks for everything in it."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from fastapi import APIRouter
from fastapi.dependencies.models import Dependant
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.generation.hypothesis.builder import HypothesisTestConfig, HypothesisTestMode, create_test
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from decode.observed import toy
from perdure.server.core.settings import ReplyDefaults
from server.live_server import LiveServer, live_server, opened
from server.test_documented_errors import document


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    store = tmp_path_factory.mktemp("store")
    # With a seed, so that what is drawn does not depend on the day: an empty summary is a 500.
    defaults = ReplyDefaults(sampling={"seed": 7})
    with (
        opened(toy(), slots=4, store=store) as rt,
        live_server(rt, request_seconds=20.0, defaults=defaults) as server,
    ):
        yield server


def test_no_request_takes_a_thread_to_learn_who_asks() -> None:
    """H8: what a route depends on is a coroutine; FastAPI calls a plain function in a thread, every time."""
    ours = [module for name, module in sys.modules.items() if name.startswith("perdure.server.")]
    routes = [route for module in ours for route in getattr(module, "router", APIRouter()).routes]
    asked = [each.call for route in routes for each in getattr(route, "dependant", Dependant()).dependencies]
    assert len(asked) > 40
    assert all(map(inspect.iscoroutinefunction, asked))


CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
)
schema = schemathesis.openapi.from_dict(document())


REQUIRED = ("/v1/messages",)
"""Where a limit of tokens must be given."""


def tries(count: int) -> settings:
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


OPERATIONS = [
    (path, method.upper()) for path, methods in schema.raw_schema["paths"].items() for method in methods
]


def draw(path: str, method: str, mode: GenerationMode, server: LiveServer, count: int) -> None:
    """Ask with requests that are drawn. Strategies are made here: schemathesis makes its own, and all cases
    that cover a schema, while tests are collected, whatever is run."""

    @tries(count)
    @given(schema[path][method].as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        ask(case, server)

    # What takes nothing cannot be asked wrongly.
    with contextlib.suppress(Unsatisfiable) if mode is GenerationMode.NEGATIVE else contextlib.nullcontext():
        check()


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_every_answer_is_as_documented(path: str, method: str, fuzzed: LiveServer) -> None:
    for mode in GenerationMode:
        draw(path, method, mode, fuzzed, 2)


@pytest.mark.full
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_every_answer_is_as_documented_for_what_covers_its_schema(
    path: str, method: str, fuzzed: LiveServer
) -> None:
    """Bounds, kinds, missing and unknown fields: some 140 requests an operation."""
    covering = HypothesisTestConfig(modes=[HypothesisTestMode.COVERAGE], project=schema.config)

    @tries(1)
    def check(case: Any) -> None:
        ask(case, fuzzed)

    create_test(operation=schema[path][method], test_func=check, config=covering)()


@pytest.mark.soak
@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_every_answer_is_as_documented_however_often_one_asks(
    path: str, method: str, mode: GenerationMode, fuzzed: LiveServer
) -> None:
    draw(path, method, mode, fuzzed, 100)


def ask(case: Any, server: LiveServer) -> None:
    if isinstance(case.body, dict):
        # A toy writes fast, but not for ever.
        name = "max_output_tokens" if case.path.startswith("/v1/responses") else "max_tokens"
        limit = case.body.get(name)
        if (limit is None and case.path not in REQUIRED) or (isinstance(limit, int) and limit > 8):
            case.body[name] = 8
            case.body.pop("max_completion_tokens", None)
        if case.path.startswith("/api/") and isinstance(case.body.get("options", {}), dict):
            case.body["options"] = {"num_predict": 8, **case.body.get("options", {})}
        for name in ("n", "best_of"):
            if isinstance(case.body.get(name), int) and case.body[name] > 2:
                case.body[name] = 2
        own = case.body.get("perdure")
        if isinstance(own, dict) and isinstance(own.get("timeout"), (int, float)) and 0 < own["timeout"] < 60:
            # Too short a time is a 504, which is right and no failure of the server.
            own["timeout"] = 60.0
    if len(str(case.query)) > 8192:
        # The line of a request has a limit, which is HTTP's.
        return
    case.validate_response(case.call(base_url=server.url), checks=CHECKS)
