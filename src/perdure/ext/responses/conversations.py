"""`/v1/conversations`: conversations that responses are made in, as sessions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path
from pydantic import Field
from pydantic_core import to_json

from perdure import Session
from perdure.ext.responses.answers import DeletedResponse, ItemList
from perdure.ext.responses.items import (
    Item,
    conversation_item_id,
    conversation_place,
    said_items,
)
from perdure.ext.responses.requests import AfterItem, ItemOrder, Metadata
from perdure.ext.responses.stored import Responses
from perdure.spi.server import (
    PAGE,
    ApiError,
    AppStateDep,
    BodyRoute,
    CallerDep,
    Items,
    Limit,
    RequestSchema,
    ResponseSchema,
    errors,
)

router = APIRouter(prefix="/v1/conversations", tags=["Responses"], route_class=BodyRoute)

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
async def create(body: ConversationRequest, app_state: AppStateDep, caller: CallerDep) -> ConversationAnswer:
    """A conversation, with what was said in it already."""

    def work() -> ConversationAnswer:
        responses = Responses(app_state, caller.namespace)
        messages = responses.messages(body.items or ())
        session = responses.new_conversation(body.metadata or {}, messages)
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
    conversation_id: ConversationId, body: ConversationRequest, app_state: AppStateDep, caller: CallerDep
) -> ConversationAnswer:
    """Other metadata."""

    def work() -> ConversationAnswer:
        session = Responses(app_state, caller.namespace).conversation(conversation_id)
        session.note({"metadata": body.metadata or {}})
        return ConversationAnswer.of(session)

    return await app_state.call(work)


@router.delete("/{conversation_id}", responses=errors(404, 409))
async def delete(
    conversation_id: ConversationId, app_state: AppStateDep, caller: CallerDep
) -> DeletedResponse:
    """Forget a conversation. Responses that were made in it stay."""

    def work() -> DeletedResponse:
        Responses(app_state, caller.namespace).conversation(conversation_id).delete()
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
    conversation_id: ConversationId, body: ItemsRequest, app_state: AppStateDep, caller: CallerDep
) -> ItemList:
    """Have more said, which the next response answers."""

    def work() -> ItemList:
        responses = Responses(app_state, caller.namespace)
        session = responses.conversation(conversation_id)
        before = session.turns
        if messages := responses.messages(body.items):
            session.append(messages)
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
        raise ApiError(404, f"there is no item {item_id!r}", code="item_not_found")

    return await app_state.call(work)


# Items of a conversation: what was said in it, in pages.

_PAGE_BYTES = 4 << 20
"""Of the items of one page, unless a single one is longer."""


class ConversationItems:
    """The items of a session's turns.

    An id names the turn and the place in it, so a page reads the turns that it shows, and finds where the
    page before it ended without counting.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def page(self, limit: int, order: str, after: str | None) -> ItemList:
        """Up to `limit` items, behind the one that is called `after`."""
        latest_first = order == "desc"
        turns, start = self._session.turns, None
        if after is not None:
            start = self._place(after)
            if start is None:
                return ItemList.of((), limit)
        first = start[0] if start else turns if latest_first else 1
        numbers = range(first, 0, -1) if latest_first else range(first, turns + 1)
        items: list[Item] = []
        size = 0
        for item in self._walk(numbers, start, latest_first=latest_first):
            size += len(to_json(item))
            if len(items) == limit or (items and size > _PAGE_BYTES):
                return ItemList.of([*items, item], len(items))
            items.append(item)
        return ItemList.of(items, limit)

    def after_turn(self, turn: int) -> list[Item]:
        """All items behind a turn."""
        numbers = range(turn + 1, self._session.turns + 1)
        return list(self._walk(numbers, None, latest_first=False))

    def get(self, item_id: str) -> Item | None:
        place = self._place(item_id)
        return self._of_turn(place[0])[place[1]] if place else None

    def _walk(self, numbers: range, start: tuple[int, int] | None, *, latest_first: bool) -> Iterator[Item]:
        """The items of turns, without those of the first turn up to the place `start`."""
        for number in numbers:
            items = self._of_turn(number)
            if start is not None and number == start[0]:
                items = items[: start[1]] if latest_first else items[start[1] + 1 :]
            yield from reversed(items) if latest_first else items

    def _of_turn(self, number: int) -> list[Item]:
        [turn] = self._session.history(limit=1, after=number - 1)
        messages = [*turn.messages, *([turn.reply] if turn.reply is not None else [])]
        items = said_items(messages, self._session.name)
        for at, item in enumerate(items):
            item["id"] = conversation_item_id(item["id"].partition("_")[0], self._session.name, number, at)
        return items

    def _place(self, item_id: str) -> tuple[int, int] | None:
        """The turn of an item and its place there; None where there is no such item."""
        place = conversation_place(item_id, self._session.name)
        if place is None or not 0 < place[0] <= self._session.turns:
            return None
        items = self._of_turn(place[0])
        return place if place[1] < len(items) and items[place[1]]["id"] == item_id else None
