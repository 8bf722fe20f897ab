"""llama-server's small routes that clients probe: `/props`, `/slots`, `/apply-template`."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter

from perdure.chat.options import ChatOptions
from perdure.server.core.app_state import AppState, AppStateDep, CallerDep, ServedDep
from perdure.server.core.schemas import ResponseSchema, errors
from perdure.server.protocols.chat import ChatRequest, check_chat_options, reply_request

router = APIRouter(tags=["llama-server"])


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


@router.get("/props", responses=errors())
async def props(app_state: ServedDep, caller: CallerDep) -> PropsAnswer:
    """The model, its template and its context, in llama-server's words."""
    runtime = app_state.runtime
    return PropsAnswer(
        default_generation_settings={"n_ctx": runtime.n_ctx, "params": dict(app_state.defaults.sampling)},
        total_slots=runtime.slots,
        model_alias=app_state.name,
        model_path=app_state.name,
        chat_template=runtime.model.info.template or "",
        modalities={"vision": False, "audio": False},
        build_info=f"perdure {version('perdure')}",
    )


@router.get("/slots", responses=errors())
async def slots(app_state: ServedDep, caller: CallerDep) -> list[SlotProps]:
    """The slots, in llama-server's words. How much one holds is told to its owner."""
    return await app_state.call(_slots, app_state, caller.namespace)


@router.post("/apply-template", responses=errors())
async def apply_template(asked: ChatRequest, app_state: AppStateDep, caller: CallerDep) -> PromptAnswer:
    """The prompt that a chat request makes, without answering it."""
    check_chat_options(asked, app_state, caller.notes)
    app_state = await app_state.serving(asked.model, caller.visit)
    return await app_state.work(_apply_template, app_state, asked, caller.namespace)


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


def _apply_template(app_state: AppState, asked: ChatRequest, namespace: str) -> PromptAnswer:
    wanted = reply_request(asked, app_state)
    options, _ = ChatOptions.split(wanted.options)
    prompt = app_state.runtime.chat_format.prompt(
        wanted.messages, options, namespace=namespace, must_fit=True
    )
    return PromptAnswer(prompt=app_state.runtime.model.detokenize(prompt.transcript.tokens, special=True))
