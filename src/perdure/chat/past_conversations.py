"""Past conversations: how the model read the histories that clients send again with every request.

    request 1   system, user 1                      text, tokens and rendering, with reply 1
    request 2   system, user 1, reply 1, user 2     begins with them: only user 2 is rendered and tokenised

Always holds: a past conversation never changes what a request says. Its tokens and its rendering stand for
text that the request has too, character by character. Reasoning that the client left out is put back behind
the very call that it led to, which an id that was drawn here proves, or the digest of all that came before.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, takewhile
from typing import Any, TypeAlias

from perdure.chat.message import Message, Tool
from perdure.chat.options import ChatOptions
from perdure.chat.template.template import Rendering
from perdure.chat.transcript import ChatTokenizer, Transcript, shared_length

_LIMIT = 48 << 20
"""Bytes of all that is remembered, about."""
_CUT, _TOKEN, _MESSAGE, _OVERHEAD = 128, 4, 512, 2048
"""Bytes that a cut of a transcript, a token and a message take, and a conversation besides what it holds."""
_COMPARED = 16
"""Conversations that a new prompt is compared with."""
_REACH = 8
"""Messages that a conversation may have gone on by since it was last rendered."""
_ANY_TEXT = ("utf-8", "surrogatepass")

MessageKey: TypeAlias = tuple[object, ...]
CallKey: TypeAlias = tuple[str, ...]


def message_key(message: Message) -> MessageKey:
    """What two messages are the same by. Reasoning comes back from few clients, and spaces are trimmed."""
    calls = tuple((call.name, call.arguments) for call in message.tool_calls)
    return message.role, (message.content or "").strip(), calls


@dataclass(frozen=True, eq=False)
class PastConversation:
    """A prompt, with the reply to it once that is written."""

    namespace: str
    messages: tuple[Message, ...]
    """As the template was given them, the reply at the end."""
    tools: tuple[Tool, ...]
    variables: Mapping[str, Any]
    transcript: Transcript
    """All that the model read and wrote."""
    rendering: Rendering | None = None
    """What the next prompt may be rendered from."""
    reasoning: Mapping[CallKey, str] = field(default_factory=dict)
    """Of its replies with calls, as far as clients did not send it."""
    conversation: str = ""
    """Its identity."""
    has_kept_images: bool = False
    """Whether a session had images in it, which another encoder may have read."""

    @property
    def text(self) -> str:
        return self.transcript.text

    @cached_property
    def keys(self) -> frozenset[MessageKey]:
        """Its messages, in the form for comparing. Most prompts are continued, and never need them."""
        return frozenset(map(message_key, self.messages))

    @property
    def nbytes(self) -> int:
        """What it takes of memory, about: its text stands in the messages and in the rendering too."""
        characters = len(self.text) * (1 if self.text.isascii() else 4)
        reasoning = sum(len(each) + sum(map(len, key)) for key, each in self.reasoning.items())
        return (
            3 * characters
            + _TOKEN * len(self.transcript.tokens)
            + _CUT * len(self.transcript.cuts)
            + _MESSAGE * len(self.messages)
            + reasoning
            + _OVERHEAD
        )

    def is_said_in(self, messages: Sequence[Message]) -> bool:
        """Whether a conversation of these messages is the same one: a reply is in both."""
        # One that goes on has the reply where it was given.
        there = messages[len(self.messages) - 1 : len(self.messages)]
        if there and there[0].role == "assistant" and message_key(there[0]) == message_key(self.messages[-1]):
            return True
        return any(message.role == "assistant" and message_key(message) in self.keys for message in messages)


class PastConversations:
    """The latest conversations, by namespace, up to a number of bytes. Safe from any thread.

    Always holds: a namespace loses none while another one has more.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, limit: int = _LIMIT) -> None:
        self._tokenizer = tokenizer
        self._limit = limit
        self._lock = threading.Lock()
        self._all: OrderedDict[PastConversation, None] = OrderedDict()
        """The one that was used last is the last."""
        self._sorted: dict[str, list[PastConversation]] = {}
        """Of each namespace, by their texts."""
        self._rendered: dict[object, PastConversation] = {}
        self._called: dict[CallKey, set[PastConversation]] = {}
        self._nbytes: Counter[str] = Counter()
        """What each namespace takes of memory, about."""
        self.nbytes = 0
        """What all of them take."""

    def store(self, past: PastConversation) -> None:
        """Remember a conversation, in the place of those that it continues."""
        if not past.text or past.nbytes > self._limit:
            return
        with self._lock:
            there = self._sorted.get(past.namespace, [])
            before = there[: bisect_right(there, past.text, key=_text)]
            for each in takewhile(lambda each: past.text.startswith(each.text), reversed(before)):
                self._drop(each)
            insort(self._sorted.setdefault(past.namespace, []), past, key=_text)
            self._all[past] = None
            self.nbytes += past.nbytes
            self._nbytes[past.namespace] += past.nbytes
            if past.rendering is not None:
                self._rendered[_rendering_key(past.rendering.messages, past.namespace)] = past
            for key in past.reasoning:
                self._called.setdefault(key, set()).add(past)
            while self.nbytes > self._limit:
                [(largest, _)] = self._nbytes.most_common(1)
                self._drop(next(each for each in self._all if each.namespace == largest))

    def _drop(self, past: PastConversation) -> None:
        del self._all[past]
        self.nbytes -= past.nbytes
        self._nbytes[past.namespace] -= past.nbytes
        there = self._sorted[past.namespace]
        del there[bisect_left(there, past.text, key=_text)]
        if not there:
            # A namespace that has nothing left leaves nothing behind.
            del self._sorted[past.namespace], self._nbytes[past.namespace]
        if past.rendering is not None:
            key = _rendering_key(past.rendering.messages, past.namespace)
            if self._rendered.get(key) is past:
                del self._rendered[key]
        for call in past.reasoning:
            self._called[call].discard(past)
            if not self._called[call]:
                del self._called[call]

    def near(self, text: str, namespace: str) -> list[PastConversation]:
        """Conversations that a prompt of this text may continue: first those that begin most like it, then
        the latest."""
        with self._lock:
            there = self._sorted.get(namespace, [])
            at = bisect_left(there, text, key=_text)
            # What shares the longest beginning with a text stands beside it when texts are sorted.
            for each in there[max(0, at - 1) : at + 1]:
                self._all.move_to_end(each)
            return list(
                islice((each for each in reversed(self._all) if each.namespace == namespace), _COMPARED)
            )

    def transcript(self, text: str, near: Sequence[PastConversation]) -> Transcript | None:
        """The longest beginning of a text that one of the conversations beside it has tokens for."""
        known = (self._tokenizer.shared_prefix(text, each.transcript) for each in near[:2])
        return max(
            (each for each in known if each is not None), key=lambda each: len(each.text), default=None
        )

    def rendering(self, messages: tuple[Message, ...], namespace: str) -> Rendering | None:
        """The rendering that `messages` can be rendered from."""
        for count in range(len(messages) - 1, max(0, len(messages) - 1 - _REACH), -1):
            with self._lock:
                past = self._rendered.get(_rendering_key(messages[:count], namespace))
            if past is not None and past.rendering is not None and past.rendering.begins(messages):
                return past.rendering
        return None

    def with_reasoning(
        self, messages: Sequence[Message], namespace: str, options: ChatOptions | None = None
    ) -> tuple[tuple[Message, ...], dict[CallKey, str]]:
        """The messages as they were sent, with the reasoning of calls that came without it; and that."""
        put_back: dict[CallKey, str] = {}
        if not self._called:
            return tuple(messages), put_back
        restored = []
        keys = CallKeys(namespace, options)
        for message in messages:
            sent = message
            if message.tool_calls and message.reasoning is None:
                key = keys.of(message)
                with self._lock:
                    thoughts = {each.reasoning[key] for each in self._called.get(key, ())}
                if len(thoughts) == 1:
                    [put_back[key]] = thoughts
                    message = replace(message, reasoning=put_back[key])
            keys.add(sent)
            restored.append(message)
        return tuple(restored), put_back


def closest(
    near: Sequence[PastConversation], messages: Sequence[Message], text: str
) -> PastConversation | None:
    """The prompt before this one in its conversation, as far as is known: the longest one that this text
    continues; else the one that has most of these messages, and of those the one whose text has most in
    common with this one."""
    if begun := [past for past in near if text.startswith(past.text)]:
        return max(begun, key=lambda past: len(past.text))
    keys = {message_key(message) for message in messages if message.role not in ("system", "developer")}
    best, best_score = None, (0, 0)
    for past in near:
        same = len(keys & past.keys)
        if same and (score := (same, shared_length(text, past.text))) > best_score:
            best, best_score = past, score
    return best


class CallKeys:
    """What tells the calls of a reply from others: their ids where they were drawn here. Ids that a model
    writes come again in other conversations: there, all that led to the calls has to be the same. Each
    message is read once."""

    def __init__(self, namespace: str, options: ChatOptions | None, history: Sequence[Message] = ()) -> None:
        self._namespace = namespace
        self._options = options
        self._unread = list(history)
        self._digest: Any = None

    def add(self, message: Message) -> None:
        """A message that was sent before the next calls."""
        self._unread.append(message)

    def of(self, reply: Message) -> CallKey:
        ids = tuple(call.id for call in reply.tool_calls)
        if all(call.has_drawn_id for call in reply.tool_calls):
            return (self._namespace, *ids)
        if self._digest is None:
            options = self._options
            tools, variables = (options.tools, options.variables) if options is not None else ((), None)
            self._digest = hashlib.sha256(repr((sorted(map(repr, tools)), variables)).encode(*_ANY_TEXT))
        for message in self._unread:
            self._digest.update(repr(message).encode(*_ANY_TEXT))
        self._unread = []
        whole = self._digest.copy()
        whole.update(repr(reply.tool_calls).encode(*_ANY_TEXT))
        return (self._namespace, whole.hexdigest(), *ids)


def _text(past: PastConversation) -> str:
    return past.text


def _rendering_key(messages: tuple[Message, ...], namespace: str) -> object:
    """A key that differs for most conversations; their messages decide."""
    return namespace, len(messages), messages[0], messages[-2:]
