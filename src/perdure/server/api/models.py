"""`/v1/models`, and text as tokens."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field

from perdure.options import options_of
from perdure.request_options import RequestOptions, Sampling
from perdure.server.core.app_state import AppState, AppStateDep, CallerDep
from perdure.server.core.body_route import BodyRoute
from perdure.server.core.schemas import (
    Items,
    RequestSchema,
    ResponseSchema,
    Token,
    errors,
    refuse_fields,
)


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
        OptionAnswer(
            name=each.name,
            kind=_KINDS[each.kind],
            low=each.low,
            high=each.high,
            items=each.items,
            characters=each.characters,
            default=each.default_text,
            help=each.help,
            common=each.common,
        )
        for each in (*options_of(Sampling).values(), options_of(RequestOptions)["max_tokens"])
    ]
)


@router.get("/v1/options", responses=errors(), tags=["perdure"])
async def list_options() -> OptionList:
    """The sampling settings that every protocol takes, with their ranges and defaults."""
    return _OPTIONS


@router.get("/v1/models", responses=errors())
async def list_models(app_state: AppStateDep) -> ModelList:
    """The model that this server has, by itself and with each of its adapters."""
    names = [app_state.name, *(f"{app_state.name}:{adapter}" for adapter in app_state.adapters)]
    models = [_model(app_state, name) for name in names]
    codex = [CodexModel(slug=each.id, display_name=each.id, context_window=each.n_ctx) for each in models]
    return ModelList(data=models, first_id=models[0].id, last_id=models[-1].id, models=codex)


@router.get("/v1/models/{name:path}", responses=errors(404))
async def read_model(name: str, app_state: AppStateDep) -> ModelAnswer:
    app_state.check_model(name)
    adapter = name.rpartition(":")[2]
    return _model(
        app_state, f"{app_state.name}:{adapter}" if adapter in app_state.adapters else app_state.name
    )


@router.post("/tokenize", responses=errors(), tags=["tokens"])
async def tokenize(asked: TokenizeRequest, app_state: AppStateDep, caller: CallerDep) -> TokenizeAnswer:
    """A text as token ids."""
    refuse_fields(asked, strict=app_state.strict, refused={}, notes=caller.notes)
    tokens = await app_state.call(
        app_state.runtime.model.tokenize, asked.content, special=asked.special, bos=asked.add_special
    )
    return TokenizeAnswer(tokens=tokens, count=len(tokens))


@router.post("/detokenize", responses=errors(), tags=["tokens"])
async def detokenize(asked: DetokenizeRequest, app_state: AppStateDep, caller: CallerDep) -> DetokenizeAnswer:
    """Token ids as text."""
    refuse_fields(asked, strict=app_state.strict, refused={}, notes=caller.notes)
    text = await app_state.call(app_state.runtime.model.detokenize, asked.tokens, special=asked.special)
    return DetokenizeAnswer(content=text)


def _model(app_state: AppState, name: str) -> ModelAnswer:
    model = app_state.runtime.model
    return ModelAnswer(
        id=name,
        created=int(app_state.started),
        display_name=name,
        created_at=datetime.fromtimestamp(int(app_state.started), UTC).isoformat().replace("+00:00", "Z"),
        max_input_tokens=app_state.runtime.n_ctx,
        max_tokens=app_state.runtime.n_ctx,
        owned_by="perdure",
        n_ctx=app_state.runtime.n_ctx,
        n_vocab=model.n_vocab,
        architecture=model.info.architecture,
        digest=model.digest,
    )
