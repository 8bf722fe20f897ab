"""Calls: what a token costs while a lazy grammar waits for a call, and under it, against no grammar.

Each pair is two replies with the same tools, of which one has `unchecked_calls`. Before a call, the mark that
opens one is ruled out in both. In a call, the other one is required, and is a long string.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import perdure
from bench.engine import model_path
from bench.harness import Bench, Figure, Gauge, Pairs, Run, at_least
from bench.machine import Watch
from perdure import Runtime, Template

_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{{ tools | tojson }}<|im_start|>assistant\n{# <tool_call> #}"
)
_NOTE = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 4000}},
    "required": ["text"],
}
_TOOLS = [{"name": "note", "parameters": _NOTE}]
_ASKED = [{"role": "user", "content": "Write down what you see at the sea, in all detail."}]


def steps(run: Run) -> Iterator[Figure]:
    """Seconds a token: held against not held."""
    tokens, pairs = run.pick((256, 9), (64, 3))
    with ExitStack() as held:
        rt = held.enter_context(
            perdure.open(_model(run, held), n_ctx=2048, slots=1, threads=2, template=Template(_TEMPLATE))
        )
        opener = rt.model.tokenize("<tool_call>", special=True, bos=False)[0]
        for name, choice in (("before a call", "auto"), ("in a call", "required")):
            seconds: dict[bool, list[float]] = {True: [], False: []}
            with Watch() as watch:
                for at in range(2 * pairs + 2):
                    free = at % 2 == 0
                    each = _seconds(rt, "auto" if free else choice, free, {opener: -100.0}, tokens)
                    if at > 1:
                        seconds[free].append(each)
            yield Figure(
                name=f"a token {name}, with the call held to its tool",
                against="unchecked_calls",
                unit="s",
                gauge=Gauge.COST,
                pairs=Pairs(tuple(seconds[False]), tuple(seconds[True])),
                target=at_least(0.97),
                machine=watch.machine,
            )


def _seconds(rt: Runtime, choice: str, free: bool, ruled_out: dict[int, float], tokens: int) -> float:
    settings: dict[str, Any] = {"tool_choice": choice, "unchecked_calls": free, "seed": 1}
    if choice == "auto":
        settings["logit_bias"] = ruled_out
    reply = rt.chat(_ASKED, tools=_TOOLS, max_tokens=tokens, ignore_eos=True, loop_guard=0, **settings)
    return reply.raw.timings.decode / max(1, reply.raw.timings.decoded_tokens - 1)


def _model(run: Run, held: ExitStack) -> str:
    """The default model; for a quick run a toy of the zoo."""
    if not run.quick:
        return model_path()
    from bench.agents.peer import toy_model

    return toy_model(Path(held.enter_context(tempfile.TemporaryDirectory())))


main = Bench("calls", [steps])
