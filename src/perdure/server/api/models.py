"""`/v1/models`, and text as tokens."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field

from perdure.options import options_of
from perdure.request_options import RequestOptions, Sampling
from perdure.server.core.api_error import ApiError
from perdure.server.core.app_state import AppState, AppStateDep, CallerDep, ServedDep
from perdure.server.core.body_route import BodyRoute
from perdure.server.core.schemas import (
    NO_BODY,
    Items,
    RequestSchema,
    ResponseSchema,
    Token,
    errors,
    refuse_fields,
)
from perdure.server.pool import Fit, PooledModel, facts_of, parse_duration


class TokenizeRequest(RequestSchema):
    content: str = Field(max_length=1 << 20)
    special: bool = False
    """Whether the likes of `<|im_end|>` are read as the tokens they name."""
    add_special: bool = True
    """Whether the marks are added that the model puts around every text."""


class TokenizeAnswer(ResponseSchema):
    tokens: list[int]
    count: int


class DetokenizeRequest(RequestSchema):
    tokens: Items[Token]
    special: bool = False


class DetokenizeAnswer(ResponseSchema):
    content: str


class AdapterAnswer(ResponseSchema):
    """An adapter by its name, with the scale that it has where a client says none."""

    name: str
    scale: float


class ModelAnswer(ResponseSchema):
    """A model with the fields that OpenAI's clients read, and those of Anthropic's."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int
    created: int
    owned_by: str
    n_ctx: int
    """Tokens that one request can hold."""
    n_vocab: int
    architecture: str
    digest: str
    """Empty of a model that was never loaded."""
    state: Literal["unloaded", "loading", "ready", "unloading"] = "ready"
    pinned: bool = False
    loads: int = 1
    """How often it was loaded since the server started."""
    load_seconds: float | None = None
    """That its last loading took."""
    expires_in: float | None = None
    """Seconds after which it is unloaded if nobody asks for it; none: not by time."""
    memory_bytes: int | None = None
    """That it is predicted to take, on the machine and on devices."""
    fit: Fit = "fits"
    """Whether it can be loaded beside what is loaded, in turn with it, or not at all."""
    error: str | None = None
    """Why it could not be loaded, the last time that it was tried."""
    adapter: AdapterAnswer | None = None
    """The adapter that this name adds to the model."""


class CodexModel(ResponseSchema):
    """A model as Codex reads it."""

    slug: str
    display_name: str
    context_window: int
    supported_in_api: bool = True


class ModelList(ResponseSchema):
    object: Literal["list"] = "list"
    data: list[ModelAnswer]
    has_more: bool = False
    first_id: str
    last_id: str
    models: list[CodexModel]


class OptionAnswer(ResponseSchema):
    """A setting of sampling, as it is defined: the page makes its fields from them."""

    name: str
    kind: Literal["number", "integer", "texts", "biases"]
    low: float | None
    high: float | None
    items: int | None
    characters: int | None
    default: str
    help: str
    common: bool


class OptionList(ResponseSchema):
    object: Literal["list"] = "list"
    data: list[OptionAnswer]


router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)
_KINDS: dict[type, Any] = {float: "number", int: "integer", list: "texts", dict: "biases"}
_OPTIONS = OptionList(
    data=[
        OptionAnswer.copy_of(each, kind=_KINDS[each.kind], default=each.default_text)
        for each in (*options_of(Sampling).values(), options_of(RequestOptions)["max_tokens"])
    ]
)


@router.get("/v1/options", responses=errors(), tags=["perdure"])
async def list_options() -> OptionList:
    """The sampling settings that every protocol takes, with their ranges and defaults."""
    return _OPTIONS


@router.get("/v1/models", responses=errors())
async def list_models(app_state: AppStateDep) -> ModelList:
    """The models that this server has, loaded or not, and each of them with each of its adapters."""
    models = await app_state.call(_models, app_state)
    codex = [CodexModel(slug=each.id, display_name=each.id, context_window=each.n_ctx) for each in models]
    return ModelList(data=models, first_id=models[0].id, last_id=models[-1].id, models=codex)


class LoadRequest(RequestSchema):
    keep_alive: str | int | float | None = None
    """How long it stays without a request from now on: seconds, or a duration such as 5m; below 0, always.
    Where there are keys, it only adds time, except of the operator's."""


@router.post("/v1/models/{name:path}/load", responses=errors(404, 503, 504), tags=["perdure"])
async def load_model(name: str, body: LoadRequest, app_state: AppStateDep, caller: CallerDep) -> ModelAnswer:
    """Load a model, and answer when it is."""
    refuse_fields(body, strict=app_state.server.strict, refused={}, notes=caller.notes)
    seconds = None if body.keep_alive is None else parse_duration(body.keep_alive)
    served = await app_state.serving(name, caller.visit, caller.namespace, keep_alive=seconds)
    return await app_state.call(
        _model, served, served.name, app_state.server.models.check(name, caller.namespace)
    )


@router.post(
    "/v1/models/{name:path}/unload", responses=errors(403, 404, 409), tags=["perdure"], openapi_extra=NO_BODY
)
async def unload_model(name: str, app_state: AppStateDep, caller: CallerDep) -> ModelAnswer:
    """Let a model go that is not in use; with keys, for the operator's. Its state is in the store; the next
    request loads it again."""
    model = app_state.server.models.check(name, caller.namespace)
    if model is None:
        raise ApiError(409, "this server's only model stays loaded", code="cannot_unload")
    await app_state.server.models.unload(model, caller.namespace)
    return await app_state.call(_model, app_state, model.name, model)


@router.get("/v1/models/{name:path}", responses=errors(404))
async def read_model(name: str, app_state: AppStateDep) -> ModelAnswer:
    model = app_state.server.models.check(name)
    adapter = name.rpartition(":")[2]
    view = app_state.with_model(model)
    return await app_state.call(
        _model, view, view.name, model, adapter if adapter in view.model.adapters else None
    )


@router.post("/tokenize", responses=errors(404), tags=["tokens"])
async def tokenize(body: TokenizeRequest, app_state: ServedDep, caller: CallerDep) -> TokenizeAnswer:
    """A text as token ids."""
    refuse_fields(body, strict=app_state.server.strict, refused={}, notes=caller.notes)
    tokens = await app_state.call(
        app_state.runtime.model.tokenize, body.content, special=body.special, bos=body.add_special
    )
    return TokenizeAnswer(tokens=tokens, count=len(tokens))


@router.post("/detokenize", responses=errors(404), tags=["tokens"])
async def detokenize(body: DetokenizeRequest, app_state: ServedDep, caller: CallerDep) -> DetokenizeAnswer:
    """Token ids as text."""
    refuse_fields(body, strict=app_state.server.strict, refused={}, notes=caller.notes)
    text = await app_state.call(app_state.runtime.model.detokenize, body.tokens, special=body.special)
    return DetokenizeAnswer(content=text)


def _models(app_state: AppState) -> list[ModelAnswer]:
    models: list[PooledModel | None] = [*app_state.server.models.pooled] or [None]
    bases: list[ModelAnswer] = []
    adapted: list[ModelAnswer] = []
    for model in models:
        view = app_state.with_model(model)
        bases.append(_model(view, view.name, model))
        adapted += [_model(view, view.name, model, adapter) for adapter in view.model.adapters]
    return [*bases, *adapted]


def _model(
    app_state: AppState, name: str, model: PooledModel | None, adapter: str | None = None
) -> ModelAnswer:
    facts = facts_of(app_state.runtime.backend) if model is None else model.facts()
    pooled: dict[str, Any] = {}
    if model is not None:
        pooled = {
            "state": model.loading,
            "pinned": model.pinned,
            "loads": model.loads,
            "load_seconds": model.load_seconds or None,
            "expires_in": model.expires_in if model.is_ready else None,
            "memory_bytes": model.machine + model.device or None,
            "fit": model.fit,
            # What kept it from being loaded may name files, which are for the operator's log.
            "error": type(model.error).__name__ if model.error is not None else None,
        }
    name = name if adapter is None else f"{name}:{adapter}"
    return ModelAnswer(
        id=name,
        created=int(app_state.server.started),
        display_name=name,
        created_at=datetime.fromtimestamp(int(app_state.server.started), UTC)
        .isoformat()
        .replace("+00:00", "Z"),
        max_input_tokens=facts.n_ctx,
        max_tokens=facts.n_ctx,
        owned_by="perdure",
        n_ctx=facts.n_ctx,
        n_vocab=facts.n_vocab,
        architecture=facts.architecture,
        digest=facts.digest,
        adapter=None
        if adapter is None
        else AdapterAnswer(name=adapter, scale=app_state.model.adapters[adapter]),
        **pooled,
    )
