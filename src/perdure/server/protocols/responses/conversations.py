"""`/v1/conversations`: conversations that responses are made in, as sessions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path
from pydantic import Field

from perdure.server.core.api_error import ApiError
from perdure.server.core.app_state import AppStateDep, CallerDep
from perdure.server.core.schemas import PAGE, Items, Limit, RequestSchema, ResponseSchema, errors
from perdure.server.protocols.responses.answers import DeletedResponse, ItemList
from perdure.server.protocols.responses.conversation_items import ConversationItems
from perdure.server.protocols.responses.requests import AfterItem, ItemOrder, Metadata
from perdure.server.protocols.responses.stored import Responses
from perdure.sessions.session import Session

router = APIRouter(prefix="/v1/conversations", tags=["Responses"])

ConversationId = Annotated[str, Path(max_length=100)]
Given = Annotated[Items[dict[str, Any]], Field(max_length=1024)]


class ConversationRequest(RequestSchema):
    items: Given | None = None
    metadata: Metadata | None = None


class ItemsRequest(RequestSchema):
    items: Given = Field(min_length=1)


class ConversationAnswer(ResponseSchema):
    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]

    @classmethod
    def of(cls, session: Session) -> ConversationAnswer:
        about = session.origin
        return cls(id=session.name, created_at=int(about["created"]), metadata=dict(about["metadata"]))


@router.post("", responses=errors(404, 507))
async def create(asked: ConversationRequest, app_state: AppStateDep, caller: CallerDep) -> ConversationAnswer:
    """A conversation, with what was said in it already."""

    def work() -> ConversationAnswer:
        responses = Responses(app_state, caller.namespace)
        said = responses.messages(asked.items or ())
        session = responses.new_conversation(asked.metadata or {}, said)
        return ConversationAnswer.of(session)

    return await app_state.call(work)


@router.get("/{conversation_id}", responses=errors(404))
async def read(
    conversation_id: ConversationId, app_state: AppStateDep, caller: CallerDep
) -> ConversationAnswer:
    return await app_state.call(
        lambda: ConversationAnswer.of(Responses(app_state, caller.namespace).conversation(conversation_id))
    )


@router.post("/{conversation_id}", responses=errors(404, 507))
async def update(
    conversation_id: ConversationId, asked: ConversationRequest, app_state: AppStateDep, caller: CallerDep
) -> ConversationAnswer:
    """Other metadata."""

    def work() -> ConversationAnswer:
        session = Responses(app_state, caller.namespace).conversation(conversation_id)
        session.note({"metadata": asked.metadata or {}})
        return ConversationAnswer.of(session)

    return await app_state.call(work)


@router.delete("/{conversation_id}", responses=errors(404, 409))
async def delete(
    conversation_id: ConversationId, app_state: AppStateDep, caller: CallerDep
) -> DeletedResponse:
    """Forget a conversation. Responses that were made in it stay."""

    def work() -> DeletedResponse:
        responses = Responses(app_state, caller.namespace)
        responses.delete(responses.conversation(conversation_id).name)
        return DeletedResponse(id=conversation_id, object="conversation.deleted")

    return await app_state.call(work)


@router.get("/{conversation_id}/items", responses=errors(404))
async def list_items(
    conversation_id: ConversationId,
    app_state: AppStateDep,
    caller: CallerDep,
    limit: Limit = PAGE,
    order: ItemOrder = "desc",
    after: AfterItem = None,
) -> ItemList:
    """What was said in it, the latest first."""

    def work() -> ItemList:
        session = Responses(app_state, caller.namespace).conversation(conversation_id)
        return ConversationItems(session).page(limit, order, after)

    return await app_state.call(work)


@router.post("/{conversation_id}/items", responses=errors(404, 409, 507))
async def add_items(
    conversation_id: ConversationId, asked: ItemsRequest, app_state: AppStateDep, caller: CallerDep
) -> ItemList:
    """Have more said, which the next response answers."""

    def work() -> ItemList:
        responses = Responses(app_state, caller.namespace)
        session = responses.conversation(conversation_id)
        before = session.turns
        if said := responses.messages(asked.items):
            session.append(said)
        added = ConversationItems(session).after_turn(before)
        return ItemList.of(added, len(added))

    return await app_state.call(work)


@router.get("/{conversation_id}/items/{item_id}", responses=errors(404))
async def read_item(
    conversation_id: ConversationId,
    item_id: Annotated[str, Path(max_length=100)],
    app_state: AppStateDep,
    caller: CallerDep,
) -> dict[str, Any]:
    def work() -> dict[str, Any]:
        session = Responses(app_state, caller.namespace).conversation(conversation_id)
        if (item := ConversationItems(session).get(item_id)) is not None:
            return item
        raise ApiError(404, f"there is no item {item_id!r}", kind="not_found_error", code="item_not_found")

    return await app_state.call(work)
