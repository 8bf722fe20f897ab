"""A server whose model writes what a test tells it to: real tokens, drawn from rows that leave but one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from typing import Any

import numpy as np

from decode.observed import toy
from perdure import LogitsView, Runtime, Template
from server.live_server import LiveServer, live_server, opened

THINKS = Template(
    "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content or '' }}{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}{# <think> #}",
    name="thinks",
)
"""Shows reasoning and calls of all turns, so that a conversation goes on from its own tokens."""


def saying(text: str, model: Any) -> Callable[..., Any]:
    """A processor that makes the model say `text`, marks included, and then end."""
    tokens = [*model.tokenize(text, special=True, bos=False), min(model.ends)]
    said = 0

    def steer(so_far: Sequence[int], view: LogitsView) -> Any:
        nonlocal said
        row = np.full(view.size, -np.inf, np.float32)
        row[tokens[min(said, len(tokens) - 1)]] = 0
        said += 1
        return row

    return steer


def steer(rt: Runtime, *texts: str) -> None:
    """Have a runtime's replies be `texts`, one after another, and then the last one for ever."""
    left = chain(texts[:-1], repeat(texts[-1]))
    plan = rt.chat_format.plan

    def steered(messages: Any, **settings: Any) -> Any:
        return plan(messages, processors=(saying(next(left), rt.model),), **settings)

    rt.chat_format.plan = steered  # type: ignore[method-assign]


@contextmanager
def scripted(*texts: str, **settings: Any) -> Iterator[LiveServer]:
    """A server on a toy that says `texts`."""
    with opened(toy(), **{"template": THINKS, **settings}) as rt:
        steer(rt, *texts)
        with live_server(rt) as server:
            yield server
