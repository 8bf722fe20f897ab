"""App state: what a route has: the server, the model that its request asks for, and the caller."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ParamSpec, TypeVar

from fastapi import Depends, Request

from perdure.runtime import Runtime
from perdure.server.core.api_error import ApiError
from perdure.server.core.server_state import ServedModel, ServerState, services
from perdure.server.core.visit import VISIT, Caller, Sign, Visit
from perdure.server.pool import PooledModel

P = ParamSpec("P")
T = TypeVar("T")

_KEY_CHARACTERS = 255
"""Of an idempotency key."""
_PRODUCT = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
_AGENT = 64
"""Characters of a program's name that are kept."""


@dataclass(frozen=True, slots=True)
class AppState:
    """A server, and one of its models."""

    server: ServerState
    model: ServedModel

    @classmethod
    def of(cls, server: ServerState) -> AppState:
        """With the model that is meant where nobody names one."""
        return cls(server, server.models.first)

    @property
    def runtime(self) -> Runtime:
        return self.model.runtime

    @property
    def name(self) -> str:
        """What the model is called in answers."""
        return self.model.name

    @property
    def fingerprint(self) -> str:
        return f"fp_{self.runtime.model.digest[:16]}"

    @property
    def is_loaded(self) -> bool:
        """Whether the engine can be asked without being loaded for that."""
        return self.server.models.is_loaded(self.model)

    def with_model(self, model: PooledModel | None) -> AppState:
        """The server with that model, or without one its first, as it is: nothing is loaded."""
        return AppState(self.server, self.server.models.served(model))

    async def call(self, function: Callable[P, T], /, *args: P.args, **keywords: P.kwargs) -> T:
        """What `function` gives, called in a thread."""
        return await self.server.call(function, *args, **keywords)

    async def work(self, function: Callable[P, T], /, *args: P.args, **keywords: P.kwargs) -> T:
        """The same for what takes long by its nature."""
        return await self.server.work(function, *args, **keywords)

    async def serving(
        self,
        model_name: str,
        visit: Visit,
        namespace: str = "",
        *,
        sign: Sign | bool = False,
        keep_alive: float | None = None,
    ) -> AppState:
        """The server with another model, as `ModelDirectory.lease` says."""
        model = await self.server.models.lease(model_name, visit, namespace, sign=sign, keep_alive=keep_alive)
        return AppState(self.server, model)

    def model_options(self, model_name: str) -> dict[str, Any]:
        """What a model's name says of a reply: `name:adapter` is computed with that adapter."""
        _, colon, adapter = model_name.rpartition(":")
        adapters = self.model.adapters
        return {"adapters": {adapter: adapters[adapter]}} if colon and adapter in adapters else {}

    def forget(self, namespace: str) -> None:
        """Have services forget the prompts of a namespace; without one, all."""
        for service in services():
            service.forget(self.runtime, namespace)


# Not plain functions, which FastAPI would call in a thread each.


async def _app_state(request: Request) -> AppState:
    return AppState.of(request.app.state.server)


async def _caller(request: Request) -> Caller:
    state = request.state
    agent = _agent(request.headers.get("user-agent", ""))
    account, request_id = getattr(state, "account", None), getattr(state, "request_id", "")
    visit = getattr(state, VISIT, None) or Visit()
    headers = request.headers if request.app.state.server.conversations else None
    key = _idempotency_key(request.headers.get("idempotency-key"))
    return Caller(state.namespace, state.notes, agent, account, request_id, headers, visit, key)


def _idempotency_key(value: str | None) -> str | None:
    if value is not None and (not 0 < len(value) <= _KEY_CHARACTERS or not value.isprintable()):
        raise ApiError(
            400,
            f"Idempotency-Key: a text of 1 to {_KEY_CHARACTERS} printable characters, got {len(value)}",
            code="invalid_value",
        )
    return value


async def _looked_at(request: Request) -> AppState:
    app_state = await _app_state(request)
    name = request.query_params.get("model", "")
    return app_state.with_model(app_state.server.models.check(name, request.state.namespace))


async def _served(request: Request) -> AppState:
    app_state = await _app_state(request)
    visit = getattr(request.state, VISIT, None) or Visit()
    return await app_state.serving(request.query_params.get("model", ""), visit, request.state.namespace)


def _agent(header: str) -> str:
    """The product that a User-Agent names first, without its version. Browsers all name the same one."""
    product = _PRODUCT.match(header.strip())
    if product is None:
        return ""
    return "browser" if product[0] == "Mozilla" else product[0][:_AGENT]


AppStateDep = Annotated[AppState, Depends(_app_state)]
LoadedDep = Annotated[AppState, Depends(_looked_at)]
"""The app state with the model that the query names, as it is: looking loads nothing, and keeps nothing
loaded."""
ServedDep = Annotated[AppState, Depends(_served)]
"""The app state with the model that the query names as `model`, loaded: for routes that need an engine and
have no body that names one."""
CallerDep = Annotated[Caller, Depends(_caller)]
