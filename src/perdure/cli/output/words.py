"""Figures in words."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

if TYPE_CHECKING:
    from perdure import ChatReply, ContextOverflow
    from perdure.decode.request import Timings

_TIERS = {
    "slot": "still in the engine",
    "memory": "from memory",
    "disk": "from disk",
    "shared": "from the shared directory",
    "s3": "from S3",
    "redis": "from Redis",
    "archive": "from disk, where it lay before",
}

size = decimal
"""Bytes as people write them."""


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def needed(error: ContextOverflow) -> str:
    """How many tokens were too many, as far as they were counted."""
    return ("at least " if error.at_least else "") + count(error.needed, "token")


def quoted(name: str) -> str:
    """A name as one line, whatever is in it."""
    return name if name.isprintable() and name.strip() == name and name else repr(name)


def sources(tiers: Mapping[str, int], computed: int) -> str:
    """Where the state of tokens comes from."""
    known = _known(tiers)
    return ", ".join([*known, f"{computed} to compute"] if computed or not known else known)


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def moment(time: float) -> str:
    return datetime.fromtimestamp(time).strftime("%Y-%m-%d %H:%M")


def effort(reply: ChatReply) -> str:
    """What a reply took."""
    reuse, timings = reply.reuse, reply.timings
    return (
        f"prompt   {', '.join([*_known(reuse.tiers), f'{reuse.computed} computed'])} ({reuse.why})\n"
        f"reading  {count(timings.prefilled_tokens, 'token')} in {milliseconds(timings.prefill)} "
        f"({timings.prefill_speed:.0f}/s)\n"
        f"writing  {count(timings.decoded_tokens, 'token')} in {milliseconds(timings.decode)} "
        f"({timings.decode_speed:.1f}/s), ended by {reply.finish_reason}, seed {reply.seed}{guesses(timings)}"
    )


def guesses(timings: Timings) -> str:
    """What became of tokens that were forced or guessed, behind other words; nothing where none were."""
    text = f", {timings.forced_tokens} forced" if timings.forced_tokens else ""
    if timings.drafted_tokens:
        text += f", {timings.accepted_tokens} of {timings.drafted_tokens} guesses right"
        text += f" ({timings.gain:.2f} times as fast)" if timings.saved else ""
    return text


def _known(tiers: Mapping[str, int]) -> list[str]:
    return [f"{tokens} {_TIERS.get(tier, f'from {tier}')}" for tier, tokens in tiers.items() if tokens]


def served_model(model: dict[str, Any]) -> str:
    """A line about a model: `small: ready, pinned, 4096 tokens, about 0.5 GiB`."""
    parts = [model.get("state", "ready")]
    if model.get("pinned"):
        parts.append("pinned")
    if (left := model.get("expires_in")) is not None:
        parts.append(f"unloaded after {left:.0f} s without a request")
    parts.append(f"{model['n_ctx']} tokens a request")
    if model.get("memory_bytes"):
        parts.append(f"about {model['memory_bytes'] / 2**30:.1f} GiB")
    if model.get("load_seconds"):
        parts.append(f"loaded {model['loads']} times, the last in {model['load_seconds']:.1f} s")
    if model.get("error"):
        parts.append(f"the last loading failed ({model['error']}); the server's log says why")
    return f"{model['id']}: {', '.join(parts)}"
