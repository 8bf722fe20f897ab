"""Stored responses: each is a record in the session store that stands at a turn, which is the response."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from pydantic_core import to_json

from perdure import ContextOverflow, Message, Session, SessionNotFoundError, Turn
from perdure.ext.responses.answers import ResponseHead, error_detail, not_kept
from perdure.ext.responses.items import (
    Item,
    is_conversation_id,
    is_response_id,
    make_item_id,
    messages_of,
    new_conversation_id,
    new_response_id,
    owner_of,
    with_kept_images,
)
from perdure.ext.responses.requests import (
    PromptRequest,
    ResponseRequest,
    input_items,
    input_messages,
    output_form,
    preamble,
    prompt_options,
    reply_options,
    tool_set,
)
from perdure.ext.responses.stream import OPENING, SentPart
from perdure.spi.base import draw_seed
from perdure.spi.chat import SUMMARY_REQUEST, ChatOptions, SummaryPasses
from perdure.spi.server import (
    MARKS,
    ApiError,
    AppState,
    ReplyDefaults,
    ReplyRequest,
    cache_marks,
    has_breakpoint,
    ignored_fields,
    invalid,
    to_api_error,
)
from perdure.spi.sessions import RESPONSE, TurnExtra, TurnStream, respond, today

CONVERSATION = "conversation"
_REFERENCES, _REMOVES = 1024, 16
"""Items that one request may name by their ids, those that they name in turn included, and over how many
responses in a row that may go."""
_SUMMARY = 1024
"""Tokens of a summary, at most."""


class Responses:
    """The stored responses of one namespace. Every call may wait for the disk or the tokenizer.

    Always holds: what a client was told the id of is on the disk, with all that it takes to make the
    reply again as it was: the request and its seed. Its turn is there once the reply is whole.
    """

    def __init__(self, app_state: AppState, namespace: str) -> None:
        self._app_state = app_state
        self._namespace = namespace
        self._sessions = app_state.runtime.sessions
        self._named: dict[str, _NamedItems | None] = {}
        """The items of responses that were named, by the response: each is read once a request."""
        self.references = self._removes = self._named_bytes = 0

    # Beginning.

    def start(
        self, body: ResponseRequest, notes: dict[str, Any]
    ) -> tuple[StoredResponse, TurnStream | ApiError]:
        """A new response, and the job that makes it; `notes` are those of its turn.

        A request that is refused leaves nothing behind, with one exception: a streaming client gets the
        error of a prompt that is too long within the stream, so that response stays as failed, and the error
        is returned.
        """
        response = self._begin(body)
        try:
            return response, self.submit(response, notes)
        except ContextOverflow as error:
            if body.stream:
                refused = to_api_error(error)
                response.end("failed", error_detail(refused))
                return response, refused
            self.delete(response.head.id)
            raise
        except BaseException:
            self.delete(response.head.id)
            raise

    def _begin(self, body: ResponseRequest) -> StoredResponse:
        """A new response, written down before anybody hears of it."""
        before, turn = self._before(body), self._fork_turn(body)
        # Read once before anything is written: what is wrong with it is said now.
        for message in itertools.chain(*self._read(body)):
            for _, image in message.images:
                self._app_state.runtime.chat_format.image_reader().keep(image, self._namespace)
        request = body.model_dump(mode="json", exclude_none=True, by_alias=True)
        request |= {
            name: with_kept_images(request[name]) for name in ("input", "instructions") & request.keys()
        }
        response_id = new_response_id()
        defaults = self._app_state.server.defaults
        seed = {**defaults.sampling, **body.sampling}.get("seed")
        about = {
            "how": RESPONSE,
            "request": request,
            "seed": seed if seed is not None else draw_seed(),
            # Those of now: the settings may change before the reply is made again.
            "defaults": defaults.to_json(),
            "created": int(time.time()),
            # Templates with a date, too: it may be another day by then.
            "date": today(),
            "model": self._app_state.name,
        }
        session = respond(
            self._sessions, response_id, about, after=before, turn=turn, namespace=self._namespace
        )
        self._sessions.expire(RESPONSE, self._app_state.server.limits.response_seconds)
        return self._opened(session)

    def unstored_head(self, body: ResponseRequest) -> ResponseHead:
        """Of a response that leaves nothing behind."""
        return self._head(new_response_id(), body, int(time.time()), self._app_state.name)

    def submit_unstored(self, body: ResponseRequest) -> TurnStream:
        """Have a reply made that leaves nothing behind, whatever conversation its client names."""
        before = self._before(body)
        instructions, new_messages = self._read(body)
        options = self._app_state.server.defaults.fill(self._options(body, new_messages))
        if before is None:
            request = ReplyRequest(messages=[*instructions, *new_messages], options=options)
            return request.submit_alone(self._app_state.runtime, self._namespace)
        return before.submit_unkept(
            new_messages, preamble=instructions, turn=self._fork_turn(body), **options
        )

    def count(self, body: PromptRequest) -> int:
        """The tokens of a prompt."""
        before = self._before(body)
        instructions, new_messages = self._read(body)
        history = before.messages() if before is not None else []
        options = prompt_options(body, tool_set(body.tools or ()))
        messages = [*instructions, *history, *new_messages]
        return self._app_state.runtime.count_chat(messages, namespace=self._namespace, **options)

    def to_sum_up(self, body: PromptRequest) -> tuple[SummaryPasses, list[Message]]:
        """All that was said, in the parts in which it is summed up; and as it was said."""
        before = self._before(body)
        instructions, new_messages = self._read(body)
        conversation = [*(before.messages() if before is not None else ()), *new_messages]
        if not conversation:
            raise invalid("input", "there is nothing to sum up")
        request = Message(role="user", content=SUMMARY_REQUEST)
        chat_format = self._app_state.runtime.chat_format

        def fits(part: Sequence[Message]) -> bool:
            options = {**self._summary_options(), "overflow": "error"}
            return chat_format.fits([*part, request], namespace=self._namespace, **options)

        # The instructions are part of what is kept of the conversation's beginning.
        whole = [*instructions, *conversation]
        return SummaryPasses(whole if fits(whole) else conversation, fits), conversation

    def submit_summary(
        self, part: Sequence[Message], words: str, *, temperature: float, timeout: float
    ) -> TurnStream:
        """Have a part summed up, asked for in these words."""
        return self._app_state.runtime.submit_chat(
            [*part, Message(role="user", content=words)],
            namespace=self._namespace,
            **{"temperature": temperature, "seed": 1, **self._app_state.server.defaults.sampling},
            **self._summary_options(),
            timeout=timeout,
        )

    def read_ahead(self, body: PromptRequest, conversation: Sequence[Message], summary: str) -> None:
        """Have what goes on from a compaction read while the engine is idle: what the user said and the
        summary, behind the instructions that the request has."""
        options = self._app_state.server.defaults.fill(prompt_options(body, tool_set(body.tools or ())))
        if not options["settle"]:
            return
        chat_options, _ = ChatOptions.split(options)
        chat_format = self._app_state.runtime.chat_format
        messages: Sequence[Message] = [
            *preamble(body, self._decrypt, self.find_items),
            *(each for each in conversation if each.role == "user"),
            Message(role="system", content=summary),
        ]
        if options["stable_prefix"]:
            messages = chat_format.ruled(messages, self._namespace)
        chat_format.prefetch_next(
            messages, chat_options, namespace=self._namespace, known=None, adapters=None
        )

    def _summary_options(self) -> dict[str, Any]:
        return {"max_tokens": min(_SUMMARY, self._app_state.runtime.n_ctx // 4), "reasoning": "hide"}

    # Finding.

    def get(self, response_id: str) -> StoredResponse:
        return self._opened(self._find(response_id, "response"))

    def new_conversation(self, metadata: Mapping[str, str], messages: Sequence[Message]) -> Session:
        about = {"how": CONVERSATION, "metadata": dict(metadata), "created": int(time.time())}
        return respond(
            self._sessions,
            new_conversation_id(),
            about,
            kind=CONVERSATION,
            namespace=self._namespace,
            said=messages,
        )

    def messages(self, items: Sequence[Item]) -> list[Message]:
        """The messages that items make."""
        self.references = self._named_bytes = 0
        return messages_of(items, self._decrypt, self.find_items)

    def delete(self, response_id: str) -> None:
        """Forget a response that there is."""
        self._sessions.response(response_id, self._namespace).delete()

    def conversation(self, conversation_id: str) -> Session:
        if is_conversation_id(conversation_id):
            with suppress(SessionNotFoundError):
                session = self._sessions.get(conversation_id, self._namespace)
                # Another one may have been given such a name by its owner.
                if session.origin.get("how") == CONVERSATION:
                    return session
        raise _missing("conversation", conversation_id)

    def _find(self, response_id: str, what: str) -> Session:
        if is_response_id(response_id):
            with suppress(SessionNotFoundError):
                return self._sessions.response(response_id, self._namespace)
        raise _missing(what, response_id)

    def _before(self, body: PromptRequest) -> Session | None:
        """The session that a request goes on from."""
        previous, conversation = body.previous_response_id, body.conversation
        extension = body.perdure if isinstance(body, ResponseRequest) else None
        if extension is not None and extension.place is not None:
            name = "session" if extension.session is not None else "fork_from"
            if name == "session" or previous is not None or conversation is not None:
                raise invalid(
                    f"perdure.{name}",
                    "a response goes on from one of previous_response_id, conversation and perdure.fork_from",
                )
            assert extension.fork_from is not None
            return self._sessions.get(extension.fork_from, self._namespace)
        if previous is not None and conversation is not None:
            raise invalid("conversation", "give it or previous_response_id, not both")
        if conversation is not None:
            return self.conversation(conversation if isinstance(conversation, str) else conversation.id)
        if previous is None:
            return None
        response = self.get(self._checked(previous))
        if response.turn is None:
            raise ApiError(
                409,
                f"previous_response_id: {previous!r} is not finished; read it to its end first, by "
                f"GET /v1/responses/{previous}",
                param="previous_response_id",
                code="response_not_finished",
            )
        return response.session

    def _fork_turn(self, body: ResponseRequest) -> int | None:
        """After which turn of the session before it a response begins; None: where that one stands."""
        return body.perdure.fork_turn if body.perdure is not None else None

    def _checked(self, previous: str) -> str:
        try:
            self._find(previous, "previous response")
        except ApiError as error:
            raise ApiError(
                error.status,
                f"previous_response_id: {error}",
                kind="invalid_request_error",
                param="previous_response_id",
                code="previous_response_not_found",
            ) from None
        return previous

    def find_items(self, item_id: str) -> list[Item]:
        """What an item's id stands for. All that a request names together is no larger than a body may be."""
        owner = owner_of(item_id)
        self.references += 1
        self._removes += 1
        try:
            limit = self._app_state.server.limits.body_bytes
            if self.references > _REFERENCES or self._removes > _REMOVES or self._named_bytes > limit:
                raise invalid(
                    "input",
                    f"more than {_REFERENCES} items are named by their ids, or over more than "
                    f"{_REMOVES} responses, or they have more than {limit} bytes; send the items themselves",
                )
            if owner is not None and owner not in self._named:
                response = self._response(owner)
                self._named[owner] = _NamedItems(response) if response is not None else None
            named = self._named[owner] if owner is not None else None
            if named is not None:
                before = self.references
                item, inner = named.find(item_id)
                # Those that it names in turn count each time, though they are looked up once.
                self.references = before + inner
                if item is not None:
                    self._named_bytes += named.size(item_id)
                    return [item]
        finally:
            self._removes -= 1
        raise ApiError(404, f"there is no item {item_id!r}", param="input", code="item_not_found")

    # Inside.

    def _response(self, response_id: str | None) -> StoredResponse | None:
        try:
            return self.get(response_id) if response_id is not None else None
        except ApiError:
            return None

    def _read(self, body: PromptRequest) -> tuple[list[Message], list[Message]]:
        """The instructions and the input of a request, as messages."""
        self.references = self._named_bytes = 0
        new_messages = input_messages(body, self._decrypt, self.find_items)
        self._app_state.server.check_message_count(len(new_messages))
        return preamble(body, self._decrypt, self.find_items), new_messages

    def _options(self, body: ResponseRequest, new_messages: Sequence[Message]) -> dict[str, Any]:
        """What is asked of the reply, and of what was said up to its cache marks."""
        options = {
            **self._app_state.model_options(body.model or ""),
            **reply_options(body, tool_set(body.tools or ()), self._app_state),
        }
        items = input_items(body)
        marked = [
            at
            for at, item in enumerate(items)
            if has_breakpoint(item.get("content")) or has_breakpoint(item.get("output"))
        ]
        befores = [len(self.messages(items[: at + 1])) for at in marked[-MARKS:]]
        key, cache_options = body.prompt_cache_key, body.prompt_cache_options
        if marks := cache_marks(befores, len(new_messages), key=key, options=cache_options):
            options["cache_marks"] = marks
        return options

    def _decrypt(self, encrypted: str) -> str | None:
        return self._app_state.server.reasoning_cipher.decrypt(encrypted, self._namespace)

    def _head(self, response_id: str, body: ResponseRequest, created: int, model: str) -> ResponseHead:
        tools = tool_set(body.tools or ())
        return ResponseHead(
            id=response_id,
            created=created,
            model=model,
            echo=body.echo,
            form=output_form(body, tools, response_id, self._app_state, self._namespace),
            stores=body.stores,
            with_logprobs=bool(body.top_logprobs) or "message.output_text.logprobs" in (body.include or ()),
            piece=lambda token: self._app_state.runtime.model.piece(token, special=True),
            ignored=ignored_fields(body),
        )

    def _opened(self, session: Session) -> StoredResponse:
        about = session.origin
        body = ResponseRequest.model_validate(about["request"])
        head = self._head(session.name, body, int(about["created"]), str(about["model"]))
        return StoredResponse(self, session, body, head)

    @property
    def is_exact(self) -> bool:
        return self._app_state.runtime.backend.exact

    def submit(self, response: StoredResponse, notes: dict[str, Any]) -> TurnStream:
        """Have the reply made, now or again: with the same seed it is the same one."""
        body, session = response.body, response.session
        instructions, new_messages = self._read(body)
        defaults = ReplyDefaults.from_json(session.origin.get("defaults", {}))
        options = {**defaults.fill(self._options(body, new_messages)), "seed": session.origin["seed"]}
        conversation = body.conversation_id
        follower = self.conversation(conversation) if conversation is not None else None
        date = session.origin.get("date")
        extra = TurnExtra(
            preamble=instructions, notes=notes, follower=follower, date=date, call_ids=response.head.id
        )
        return session.submit(new_messages, extra=extra, **options)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One stored response."""

    responses: Responses
    session: Session
    body: ResponseRequest
    head: ResponseHead

    @property
    def turn(self) -> Turn | None:
        """The turn that it is; None while its reply is not whole."""
        if self.session.turns <= int(self.session.origin["turn"]):
            return None
        return self.session.history(after=self.session.turns - 1)[0]

    @property
    def failure(self) -> Mapping[str, Any] | None:
        """How it ended, where it did without a reply: the status, and the error."""
        if isinstance(ended := self.session.origin.get("ended"), Mapping):
            return ended
        if (why := self.session.origin.get("not_kept")) is not None:
            error = not_kept(why, could_not=bool(self.session.origin.get("could_not")))
            return {"status": "failed", "error": error_detail(error)}
        return None

    @property
    def sent(self) -> SentPart | None:
        """How far its events were sent before it was interrupted, if it was."""
        sent = self.session.origin.get("sent")
        return SentPart(**sent) if isinstance(sent, Mapping) else None

    def note_unknown(self) -> None:
        """Write down that nobody knows what was sent, where a server was killed before it could say so: a
        reply that is made again is then no client's to go on with. An exact one comes out the same."""
        if self.sent is None and not self.responses.is_exact:
            self.note_sent(SentPart(OPENING + 1, ""))

    def note_sent(self, sent: SentPart) -> None:
        """Write down how far its events were sent, unless more of them were before."""
        if self.sent is None or self.sent.number < sent.number:
            self.session.note({"sent": asdict(sent)}, bounded=False)

    def end(self, status: str, error: Mapping[str, Any] | None = None) -> None:
        """Write down that there will be no reply."""
        self.session.note({"ended": {"status": status, "error": error}}, bounded=False)

    def shown(self, running: str | None = None) -> dict[str, Any]:
        """As an object. `running` is its status while it is being made."""
        if (turn := self.turn) is not None:
            return self.head.stored(turn)
        if (failure := self.failure) is not None:
            return self.head.shown(failure["status"], error=failure["error"])
        return self.head.shown(running or "in_progress")

    def output_items(self) -> list[Item]:
        turn = self.turn
        return list(self.head.stored(turn)["output"]) if turn is not None else []

    def input_items(self) -> list[Item]:
        """What was sent, with ids."""
        items: list[Item] = []
        for item in input_items(self.body):
            if item.get("type") == "item_reference" and isinstance(item.get("id"), str):
                items += self.responses.find_items(item["id"])
                continue
            number = len(items)
            content = item.get("content")
            shown = dict(item)
            if "role" in shown:
                shown.setdefault("type", "message")
                shown.setdefault("status", "completed")
                kind = "output_text" if shown["role"] == "assistant" else "input_text"
                shown["content"] = [{"type": kind, "text": content}] if isinstance(content, str) else content
            prefix = _PREFIXES.get(str(shown.get("type")), "item")
            shown["id"] = make_item_id(prefix, self.head.id, number, of_input=True)
            items.append(shown)
        return items


class _NamedItems:
    """The items of a response that another one names by their ids, read as far as they were asked for."""

    def __init__(self, response: StoredResponse) -> None:
        self._response = response
        self._output = {item["id"]: item for item in response.output_items()}
        self._input: dict[str, Item] | None = None
        self._inner = 0
        self._sizes: dict[str, int] = {}

    def find(self, item_id: str) -> tuple[Item | None, int]:
        """An item, and how many others had to be looked up for it."""
        if item_id in self._output:
            return self._output[item_id], 0
        if self._input is None:
            # What it was asked may name others' items in turn: only where it must be looked at.
            before = self._response.responses.references
            self._input = {item["id"]: item for item in self._response.input_items()}
            self._inner = self._response.responses.references - before
        return self._input.get(item_id), self._inner

    def size(self, item_id: str) -> int:
        if item_id not in self._sizes:
            self._sizes[item_id] = len(to_json(self.find(item_id)[0], inf_nan_mode="constants"))
        return self._sizes[item_id]


_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


def _missing(what: str, name: str) -> ApiError:
    return ApiError(404, f"there is no {what} {name[:100]!r}", code=f"{what.replace(' ', '_')}_not_found")
