"""A reply as JSON, and its log probabilities and speeds as lines."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perdure import ChatReply, Reply, TokenLogprob
    from perdure.engine.contract import Tokenizer


def reply_json(reply: Reply | ChatReply, model: Tokenizer) -> dict[str, Any]:
    """Everything about a reply: of a chat also its reasoning and tool calls."""
    from perdure import ChatReply

    if not isinstance(reply, ChatReply):
        return _raw(reply, model)
    calls = [{"name": call.name, "arguments": call.arguments} for call in reply.tool_calls]
    return {
        **_raw(reply.raw, model),
        "text": reply.text,
        "reasoning": reply.reasoning,
        "tool_calls": calls,
        "finish_reason": reply.finish_reason,
    }


def logprob_line(entry: TokenLogprob, model: Tokenizer) -> str:
    chances = [(entry.token, entry.logprob), *((each.token, each.logprob) for each in entry.top)]
    first, *rest = (f"{_piece(token, model)!r} {logprob:.3f}" for token, logprob in chances)
    return first + (f"  of  {', '.join(rest)}" if rest else "")


def timing_line(reply: Reply) -> str:
    timings = reply.timings
    return (
        f"{timings.prefilled_tokens} tokens read in {timings.prefill:.2f} s ({timings.prefill_speed:.0f}/s), "
        f"{timings.decoded_tokens} written in {timings.decode:.2f} s ({timings.decode_speed:.1f}/s), "
        f"seed {reply.seed}, ended by {reply.finish_reason}"
    )


def _raw(reply: Reply, model: Tokenizer) -> dict[str, Any]:
    usage, timings = reply.usage, reply.timings
    return {
        "text": reply.text,
        "tokens": list(reply.tokens),
        "finish_reason": reply.finish_reason,
        "stop": reply.stop,
        "seed": reply.seed,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        "timings": {
            "queued": timings.queued,
            "prefill": timings.prefill,
            "decode": timings.decode,
            "prefill_speed": timings.prefill_speed,
            "decode_speed": timings.decode_speed,
        },
        "logprobs": None
        if reply.logprobs is None
        else [
            _chance(entry.token, entry.logprob, model)
            | {"top": [_chance(each.token, each.logprob, model) for each in entry.top]}
            for entry in reply.logprobs
        ],
    }


def _chance(token: int, logprob: float, model: Tokenizer) -> dict[str, Any]:
    # JSON has no word for infinity.
    known = logprob if math.isfinite(logprob) else None
    return {"token": token, "text": _piece(token, model), "logprob": known}


def _piece(token: int, model: Tokenizer) -> str:
    return model.piece(token, special=True).decode("utf-8", "replace")
