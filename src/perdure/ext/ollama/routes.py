"""Ollama's API: `/api/…`."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from perdure import PerdureError
from perdure.ext.embeddings.routes import check_width, embed
from perdure.ext.ollama.answers import (
    Kind,
    OllamaErrorAnswer,
    OllamaWriter,
    error_body,
    idle,
    nanoseconds,
    rfc3339,
)
from perdure.ext.ollama.requests import (
    CopyRequest,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    ModelNamed,
    OllamaChatRequest,
    OptionsRequest,
    chat_request,
    generate_request,
    keep_alive_seconds,
)
from perdure.spi.base import optional_part
from perdure.spi.runtime import cut
from perdure.spi.server import (
    JSON_LINES,
    ApiError,
    AppState,
    AppStateDep,
    BodyRoute,
    Caller,
    CallerDep,
    PooledModel,
    Protocol,
    Sign,
    answer,
    errors,
    event,
    fill_in,
    invalid,
    is_operator,
    refuse_fields,
)

router = APIRouter(tags=["Ollama"], route_class=BodyRoute)


def _lines(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {
        200: {
            "description": "Lines of JSON, or with `stream` false one object",
            "content": {JSON_LINES.media_type: {}},
        },
        **errors(404, 504, *statuses),
    }


@router.post("/api/chat", responses=_lines(409, 507), response_model=dict[str, Any])
async def chat(
    body: OllamaChatRequest, request: Request, app_state: AppStateDep, caller: CallerDep
) -> dict[str, Any] | Response:
    """A reply to a conversation."""
    if not body.messages:
        return await _idle(body, app_state, caller, "chat")
    app_state = await _serving(body, app_state, caller, "chat")

    def submit() -> tuple[Any, list[str]]:
        """In one thread: to read what is asked takes time too."""
        refuse_fields(body, strict=app_state.server.strict, refused={}, notes=caller.notes)
        reply_request, notes = chat_request(body, app_state)
        return reply_request.submit(app_state, caller, body), notes

    job, notes = await app_state.call(submit)
    writer = OllamaWriter(app_state.name, "chat", notes, caller.ignored)
    return await _answered(job, writer, body, request, app_state, caller)


@router.post("/api/generate", responses=_lines(409, 507), response_model=dict[str, Any])
async def generate(
    body: GenerateRequest, request: Request, app_state: AppStateDep, caller: CallerDep
) -> dict[str, Any] | Response:
    """A reply to a prompt, by the chat template or, with `raw`, as it is."""
    if not body.prompt:
        return await _idle(body, app_state, caller, "generate")
    app_state = await _serving(body, app_state, caller, "generate")

    def submit() -> tuple[Any, list[str]]:
        """In one thread: to read what is asked takes time too."""
        refuse_fields(body, strict=app_state.server.strict, refused={}, notes=caller.notes)
        reply_request, notes = generate_request(body, app_state)
        if not body.raw and not body.suffix:
            return reply_request.submit(app_state, caller), notes
        if reply_request.place is not None:
            raise invalid("perdure.session", "only for a prompt by the chat template, without raw and suffix")
        options: Any = {
            name: value for name, value in reply_request.options.items() if name not in _CHAT_ONLY
        }
        prompt: str | list[int] = body.prompt
        if body.suffix:
            prompt = fill_in(app_state, body.prompt, body.suffix)
        return app_state.runtime.submit(prompt, namespace=caller.namespace, **options), notes

    job, notes = await app_state.call(submit)
    writer = OllamaWriter(app_state.name, "generate", notes, caller.ignored)
    return await _answered(job, writer, body, request, app_state, caller)


_CHAT_ONLY = frozenset({"variables", "limit_to_context", "stable_prefix", "settle", "overflow"})


def _check_model(body: ModelNamed, app_state: AppState, caller: Caller) -> PooledModel | None:
    return app_state.server.models.check(body.model or body.name, caller.namespace)


async def _serving(
    body: OptionsRequest, app_state: AppState, caller: Caller, kind: Kind | None = None
) -> AppState:
    """The app state with the model that is asked for, which stays loaded for as long as it says."""
    name = body.model or body.name
    seconds = keep_alive_seconds(body.keep_alive)
    model = _check_model(body, app_state, caller)
    waits: Sign | bool = False
    if kind is not None and body.streams:
        writer = OllamaWriter(model.name if model is not None else name, kind)
        waits = functools.partial(writer.keep_alive, {"status": "loading model"})
    return await app_state.serving(name, caller.visit, caller.namespace, sign=waits, keep_alive=seconds)


async def _answered(
    job: Any,
    writer: OllamaWriter,
    body: OptionsRequest,
    request: Request,
    app_state: AppState,
    caller: Caller,
) -> dict[str, Any] | Response:
    return await answer(
        job,
        request,
        app_state,
        caller,
        whole=writer.whole,
        writer=writer if body.streams else None,
    )


async def _idle(
    body: OptionsRequest, app_state: AppState, caller: Caller, kind: Kind
) -> dict[str, Any] | Response:
    """Have the model loaded or, with a keep_alive of 0, let go."""
    model = _check_model(body, app_state, caller)
    name = model.name if model is not None else app_state.name
    unloads = keep_alive_seconds(body.keep_alive) == 0
    if not unloads:
        await _serving(body, app_state, caller, kind)
    elif model is not None and (model.can_unload or model.pinned):
        await app_state.server.models.unload(model, caller.namespace)
    shown = idle(name, kind, "unload" if unloads else "load")
    return _all_lines([shown]) if body.streams else shown


def _all_lines(lines: Sequence[dict[str, Any]]) -> Response:
    body = b"".join(JSON_LINES.frame(event(each)) for each in lines)
    return Response(body, media_type=JSON_LINES.media_type)


@router.post("/api/embed", responses=errors(404, 504), response_model=dict[str, Any])
async def embed_texts(
    body: EmbedRequest, request: Request, app_state: AppStateDep, caller: CallerDep
) -> Response:
    """Texts as vectors. What does not fit is an error, never cut."""
    app_state = await _serving(body, app_state, caller)
    texts = [body.input] if isinstance(body.input, str) else list(body.input)
    started = time.perf_counter()
    await check_width(body.dimensions, app_state)
    embedded = cut(await embed(texts, request, app_state, caller, model=body.model), body.dimensions)

    def encode() -> bytes:
        shown = {
            "model": app_state.name,
            "embeddings": [vector.tolist() for vector in embedded.vectors],
            "total_duration": nanoseconds(time.perf_counter() - started),
            "load_duration": 0,
            "prompt_eval_count": sum(embedded.tokens),
        }
        return json.dumps(shown).encode()

    return Response(await app_state.call(encode), media_type="application/json")


@router.post("/api/embeddings", responses=errors(404, 504))
async def embeddings(
    body: EmbeddingsRequest, request: Request, app_state: AppStateDep, caller: CallerDep
) -> dict[str, Any]:
    """An older route for one text."""
    app_state = await _serving(body, app_state, caller)
    embedded = await embed([body.prompt], request, app_state, caller, model=body.model)
    return {"embedding": embedded.vectors[0].tolist()}


@router.get("/api/tags", responses=errors())
async def tags(app_state: AppStateDep, caller: CallerDep) -> dict[str, Any]:
    """The models that are served, under each of their names."""
    models = await app_state.call(_listed, app_state)
    names = app_state.server.models.names.get(caller.namespace, {})
    copies = [
        {**model, "name": tagged(name), "model": tagged(name)}
        for name, own in names.items()
        for model in models
        if model["name"] == tagged(own)
    ]
    return {"models": [*models, *copies]}


@router.get("/api/ps", responses=errors())
async def ps(app_state: AppStateDep) -> dict[str, Any]:
    """The models that are loaded now, and until when they stay if nobody asks for them."""
    return {"models": await app_state.call(_running, app_state)}


@router.post("/api/show", responses=errors(404))
async def show(body: ModelNamed, app_state: AppStateDep, caller: CallerDep) -> dict[str, Any]:
    """A model, its template and what it can do. One that was never loaded is loaded to tell."""
    app_state = await app_state.serving(body.model or body.name, caller.visit, caller.namespace)
    return await app_state.call(OllamaModels(app_state).shown)


def _listed(app_state: AppState) -> list[dict[str, Any]]:
    if not app_state.server.models.pooled:
        return [OllamaModels(app_state).listed()]
    return [
        OllamaModels(app_state.with_model(model)).listed() if model.is_known else unloaded(app_state, model)
        for model in app_state.server.models.pooled
    ]


def _running(app_state: AppState) -> list[dict[str, Any]]:
    if not app_state.server.models.pooled:
        return [OllamaModels(app_state).running(None, 0)]
    return [
        OllamaModels(app_state.with_model(model)).running(model.expires_in, model.device)
        for model in app_state.server.models.pooled
        if model.is_ready and model.is_known
    ]


@router.get("/api/version", responses=errors())
async def version(app_state: AppStateDep) -> dict[str, str]:
    return {"version": VERSION}


@router.post("/api/pull", responses=_lines(), response_model=dict[str, Any])
async def pull(body: OptionsRequest, app_state: AppStateDep, caller: CallerDep) -> dict[str, Any] | Response:
    """Says that the model is there, where it is. Only a key of the operator has this server fetch another."""
    fetched = optional_part("model fetched for a client")
    if fetched is not None and is_operator(caller):
        pull_answer: dict[str, Any] | Response = await fetched(
            body.model or body.name, app_state, caller, streams=body.streams
        )
        return pull_answer
    try:
        model = _check_model(body, app_state, caller)
    except ApiError as error:
        if error.code != "model_not_found":
            raise
        raise ApiError(
            404,
            f"{error.args[0]} `perdure pull NAME` on its machine fetches one, and so does a pull with the "
            "key of its operator",
            code=error.code,
            param=error.param,
        ) from None
    if model is None or model.is_known:
        lines = OllamaModels(app_state.with_model(model)).pulled()
    else:
        lines = [{"status": "pulling manifest"}, {"status": "success"}]
    if not body.streams:
        return lines[-1]
    return _all_lines(lines)


@router.post("/api/create", include_in_schema=False)
@router.post("/api/push", include_in_schema=False)
@router.post("/api/blobs/{digest}", include_in_schema=False)
async def make(request: Request) -> None:
    """Refused: no client makes a model here, or takes one away."""
    raise ApiError(
        501,
        f"{request.url.path} is not served: models are made on the server's machine, by `perdure quantize`, "
        "`merge` and `fuse`; `perdure serve --model NAME=FILE` gives one a name, and system messages and "
        "options go with each request",
        code="unsupported_endpoint",
    )


@router.post("/api/copy", responses=errors(404))
async def copy(body: CopyRequest, app_state: AppStateDep, caller: CallerDep) -> dict[str, str]:
    """Another name for the model, listed for those who gave it until the server ends."""
    model = app_state.server.models.check(body.source, caller.namespace)
    names = app_state.server.models.names.setdefault(caller.namespace, {})
    if body.destination not in names and len(names) >= _NAMES:
        raise ApiError(400, f"destination: {_NAMES} names are enough; delete one first", code="invalid_value")
    names[body.destination] = model.name if model is not None else app_state.name
    return {"status": "success"}


@router.delete("/api/delete", responses=errors(404))
async def delete(body: ModelNamed, app_state: AppStateDep, caller: CallerDep) -> dict[str, str]:
    """Take a name back that was given by a copy. The model itself is chosen when the server is started."""
    name = body.model or body.name
    if name in app_state.server.models.names.get(caller.namespace, {}):
        del app_state.server.models.names[caller.namespace][name]
        return {"status": "success"}
    own = [model.name for model in app_state.server.models.pooled] or [app_state.name]
    if tagged(name) in map(tagged, own):
        raise ApiError(
            403,
            "no client can delete the model; `perdure models` manages those of this machine",
            code="forbidden",
        )
    raise ApiError(404, f"model {name[:100]!r} not found", code="model_not_found")


_NAMES = 64
"""That one namespace may give."""


@router.api_route("/", methods=["GET", "HEAD"], response_class=PlainTextResponse, include_in_schema=False)
async def running() -> Response:
    """How clients find out that somebody is there."""
    return PlainTextResponse("Ollama is running")


PROTOCOL = Protocol(
    name="Ollama",
    prefix="/api/",
    routers=(router,),
    writer=OllamaWriter,
    framing=JSON_LINES,
    error_schema=OllamaErrorAnswer,
    error_body=error_body,
    # Its documentation's own `curl -d` names another type.
    any_content_type=True,
)


# What Ollama's clients ask about models: the one that is served, under the names that it has.

VERSION = "0.13.5"
"""Of Ollama's API: clients ask for one that they can work with."""
_FOR_EVER = timedelta(days=36500)


class OllamaModels:
    """The served model as Ollama's clients see it."""

    def __init__(self, app_state: AppState) -> None:
        self._app_state = app_state
        self._model = app_state.runtime.model
        self._info = self._model.info

    @property
    def _started(self) -> datetime:
        return datetime.fromtimestamp(self._app_state.server.started, UTC)

    def listed(self) -> dict[str, Any]:
        """As an entry of a list."""
        name = tagged(self._app_state.name)
        return {
            "name": name,
            "model": name,
            "modified_at": rfc3339(self._started),
            "size": self._app_state.model.nbytes,
            "digest": self._model.digest,
            "details": self._details(),
            "capabilities": self._capabilities(),
        }

    def running(self, seconds: float | None, device: int) -> dict[str, Any]:
        """As an entry of what is loaded: how long it stays if nobody asks for it, None for ever, and how many
        bytes of it are on devices."""
        n_ctx = self._app_state.runtime.n_ctx
        stays = _FOR_EVER if seconds is None else timedelta(seconds=seconds)
        expires = rfc3339((self._started if seconds is None else datetime.now(UTC)) + stays)
        return {**self.listed(), "expires_at": expires, "size_vram": device, "context_length": n_ctx}

    def shown(self) -> dict[str, Any]:
        n_ctx = self._app_state.runtime.n_ctx
        architecture = self._info.architecture
        info: dict[str, Any] = {
            name: _plain(value)
            for name, value in self._model.metadata.items()
            if len(value) < 1000 and value != self._info.template
        }
        info["general.architecture"] = architecture
        # What can be used here, whatever the model was trained for: clients plan by it.
        info[f"{architecture}.context_length"] = n_ctx
        return {
            "modelfile": f"FROM {self._app_state.name}\nPARAMETER num_ctx {n_ctx}\n",
            "parameters": f"num_ctx                        {n_ctx}",
            "template": self._template(),
            "details": self._details(),
            "model_info": info,
            "capabilities": self._capabilities(),
            "modified_at": rfc3339(self._started),
        }

    def pulled(self) -> list[dict[str, Any]]:
        """The answer to a pull. Nothing is fetched for a client: the model is there."""
        digest = f"sha256:{self._model.digest}"
        size = self.listed()["size"]
        return [
            {"status": "pulling manifest"},
            {"status": f"pulling {digest[7:19]}", "digest": digest, "total": size, "completed": size},
            {"status": "verifying sha256 digest"},
            {"status": "writing manifest"},
            {"status": "success"},
        ]

    def _details(self) -> dict[str, Any]:
        info = self._info
        return {
            "parent_model": "",
            "format": info.file_format or "gguf",
            "family": info.architecture,
            "families": [info.architecture],
            "parameter_size": info.size_label,
            "quantization_level": info.quantisation or "unknown",
            "context_length": self._app_state.runtime.n_ctx,
        }

    def _capabilities(self) -> list[str]:
        capabilities = ["completion", "embedding"]
        try:
            chat_format = self._app_state.runtime.chat_format
        except PerdureError:
            return capabilities
        if chat_format.call_form.shown:
            capabilities.append("tools")
        if chat_format.family.reasoning is not None:
            capabilities.append("thinking")
        return capabilities

    def _template(self) -> str:
        try:
            return self._app_state.runtime.chat_format.template.source
        except PerdureError:
            return ""


def unloaded(app_state: AppState, model: PooledModel) -> dict[str, Any]:
    """A model that was never loaded, as an entry of a list: what the head of its file says."""
    facts, name = model.facts(), tagged(model.name)
    return {
        "name": name,
        "model": name,
        "modified_at": rfc3339(datetime.fromtimestamp(app_state.server.started, UTC)),
        "size": facts.nbytes,
        "digest": facts.digest,
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": facts.architecture,
            "families": [facts.architecture],
            "parameter_size": facts.size,
            "quantization_level": facts.quantisation or "unknown",
            "context_length": facts.n_ctx,
        },
        "capabilities": ["completion"],
    }


def tagged(name: str) -> str:
    """A name with its tag."""
    return name if ":" in name else f"{name}:latest"


def _plain(value: str) -> Any:
    if value in ("true", "false"):
        return value == "true"
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value
