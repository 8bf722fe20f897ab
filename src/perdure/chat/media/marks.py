"""What is done about images of a prompt besides reading them: they are named to people, and encoded again."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from perdure.chat.transcript import GUARD, MARK, MARKED, OURS, ImageTokens, Transcript
from perdure.errors import PerdureError

if TYPE_CHECKING:
    from perdure.chat.message import Image, Message

_SHOWN = re.compile(f"{GUARD}?{MARK}(?:{OURS})?([0-9a-f]{{12}})[0-9a-f]{{52}}(low)?{GUARD}?{MARK}")


def with_names(text: str) -> str:
    """A text for people, with the beginning of a digest in the place of each image."""
    return _SHOWN.sub(_shown, text) if MARK in text else text


def _shown(mark: re.Match[str]) -> str:
    return f"[image {' '.join(filter(None, mark.groups()))}]"


def are_restored(
    prompt: Transcript,
    messages: Sequence[Message],
    namespace: str,
    image_tokens: Callable[[Sequence[Message], str], ImageTokens | None],
) -> bool:
    """Have the images of a prompt encoded again, of which rows are gone; whether those that it names are
    there now. Another encoder makes others."""
    images = image_tokens(messages, namespace)
    named = {image.name for message in messages for _, image in message.images}
    # Some of what looks so was typed.
    shown = [name for name in dict.fromkeys(MARKED.findall(prompt.text)) if name in named]
    there = {token for name in shown for token in images(name)} if images is not None else set()
    return there.issuperset(token for token in prompt.tokens if token < 0)


class Reader(Protocol):
    def tokens(self, image: Image, namespace: str) -> object: ...


def restore(messages: Sequence[Message], namespace: str, reader: Callable[[], Reader]) -> None:
    """Have images of messages encoded again whose rows are gone, where their files are there."""
    for message in messages:
        for _, image in message.images:
            with suppress(PerdureError):
                reader().tokens(image, namespace)
