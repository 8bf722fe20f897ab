"""llama-server's small routes that clients probe or use: `/props`, `/slots`, `/apply-template`, `/infill`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from perdure import Delta, Reply, Stream
from perdure.spi.chat import ChatOptions
from perdure.spi.server import (
    ApiError,
    AppState,
    AppStateDep,
    BodyRoute,
    CallerDep,
    ChatRequest,
    CompletionExtension,
    Events,
    Items,
    RequestSchema,
    ResponseSchema,
    SamplingSchema,
    ServedDep,
    TimingsAnswer,
    answer,
    check_chat_options,
    errors,
    event,
    fill_in,
    refuse_fields,
    reply_request,
    streamed,
)

router = APIRouter(tags=["llama-server"], route_class=BodyRoute)


class PropsAnswer(ResponseSchema):
    """What llama-server tells of itself, as far as there is such a thing here."""

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    """The name of the model: where its file lies is nobody's business."""
    chat_template: str
    modalities: dict[str, bool]
    build_info: str
    is_sleeping: bool = False


class SlotProps(ResponseSchema):
    id: int
    n_ctx: int
    is_processing: bool
    n_past: int | None
    """Tokens that it holds, if they are yours."""


class PromptAnswer(ResponseSchema):
    prompt: str


@router.get("/props", responses=errors(404))
async def props(app_state: ServedDep, caller: CallerDep) -> PropsAnswer:
    """The model, its template and its context, in llama-server's words."""
    runtime = app_state.runtime
    return PropsAnswer(
        default_generation_settings={
            "n_ctx": runtime.n_ctx,
            "params": dict(app_state.server.defaults.sampling),
        },
        total_slots=runtime.slots,
        model_alias=app_state.name,
        model_path=app_state.name,
        chat_template=runtime.model.info.template or "",
        modalities={"vision": False, "audio": False},
        build_info=f"perdure {version('perdure')}",
    )


@router.get("/slots", responses=errors(404))
async def slots(app_state: ServedDep, caller: CallerDep) -> list[SlotProps]:
    """The slots, in llama-server's words. Only its owner sees how much a slot holds."""
    return await app_state.call(_slots, app_state, caller.namespace)


@router.post("/apply-template", responses=errors(404))
async def apply_template(body: ChatRequest, app_state: AppStateDep, caller: CallerDep) -> PromptAnswer:
    """The prompt that a chat request makes, without answering it."""
    check_chat_options(body, app_state, caller.notes)
    app_state = await app_state.serving(body.model, caller.visit)
    return await app_state.work(_apply_template, app_state, body, caller.namespace)


class InfillFile(RequestSchema):
    filename: str = Field("", max_length=1024)
    text: str


class InfillRequest(SamplingSchema):
    """What stands before the place to fill in, and what behind it."""

    input_prefix: str = ""
    input_suffix: str = ""
    prompt: str = ""
    """More of what stands before."""
    input_extra: Annotated[Items[InfillFile], Field(max_length=64)] | None = None
    """Other files, shown first."""
    n_predict: int | None = Field(None, ge=-1, lt=2**31)
    """At most so many tokens; below 1 until the model ends."""
    stream: bool | None = None
    perdure: CompletionExtension | None = None


class InfillWriter:
    """Text as it comes, in llama-server's words."""

    def keep_alive(self, progress: dict[str, Any]) -> Events:
        return [event({"content": "", "stop": False, **progress})]

    def start(self) -> Events:
        return ()

    def delta(self, delta: Delta) -> Events:
        return [event({"content": delta.text, "stop": False})] if delta.text else ()

    def end(self, replies: Sequence[Reply]) -> Events:
        return [event({**self.whole(replies), "content": ""})]

    def error(self, error: ApiError) -> Events:
        return [event(error.body)]

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        reply = replies[0]
        stop_type = "word" if reply.stop is not None else _STOP_TYPES.get(reply.finish_reason, "none")
        return {
            "content": reply.text,
            "stop": True,
            "stop_type": stop_type,
            "stopping_word": reply.stop or "",
            "tokens_predicted": reply.usage.completion_tokens,
            "tokens_evaluated": reply.usage.prompt_tokens,
            "tokens_cached": reply.usage.cached_tokens,
            "truncated": False,
            "timings": TimingsAnswer.model_validate(reply.timings).model_dump(),
            "perdure": {"finish_reason": reply.finish_reason},
        }


_STOP_TYPES = {"stop": "eos", "length": "limit", "repetition": "limit"}


@router.post("/infill", responses=streamed(404), response_model=dict[str, Any])
async def infill(
    body: InfillRequest, request: Request, app_state: ServedDep, caller: CallerDep
) -> dict[str, Any] | Response:
    """What stands between two texts, for models that have tokens for that."""
    refuse_fields(body, strict=False, refused={}, notes=caller.notes)

    def submit() -> Stream[Delta, Reply]:
        before, files = body.input_prefix + body.prompt, body.input_extra or ()
        prompt = fill_in(
            app_state,
            before,
            body.input_suffix,
            [(file.filename, file.text) for file in files],
            param="input_suffix",
        )
        limit = body.n_predict if body.n_predict is not None and body.n_predict > 0 else None
        options: dict[str, Any] = {**app_state.server.defaults.sampling, **body.sampling, "max_tokens": limit}
        if body.perdure is not None:
            options |= body.perdure.options
        options["timeout"] = app_state.server.seconds(body.perdure.timeout if body.perdure else None)
        return app_state.runtime.submit(prompt, namespace=caller.namespace, **options)

    writer = InfillWriter()
    return await answer(
        await app_state.call(submit),
        request,
        app_state,
        caller,
        whole=writer.whole,
        writer=writer if body.stream else None,
        timeout=body.perdure.timeout if body.perdure else None,
    )


def _slots(app_state: AppState, namespace: str) -> list[SlotProps]:
    runtime = app_state.runtime
    return [
        SlotProps(
            id=at,
            n_ctx=runtime.n_ctx,
            is_processing=slot.busy,
            n_past=slot.length if slot.namespace == namespace else None,
        )
        for at, slot in enumerate(runtime.cache.slots())
    ]


def _apply_template(app_state: AppState, body: ChatRequest, namespace: str) -> PromptAnswer:
    request = reply_request(body, app_state)
    options, _ = ChatOptions.split(request.options)
    prompt = app_state.runtime.chat_format.prompt(
        request.messages, options, namespace=namespace, must_fit=True
    )
    return PromptAnswer(prompt=app_state.runtime.model.detokenize(prompt.transcript.tokens, special=True))
