"""Settling: tokens that are computed before the first token of a turn, settled while idle and not.

An agent's main conversation with a template that drops the reasoning of earlier turns, subagents beside it on
the same slots. The engine is the toy, whose tokens are bytes: what is counted is work, which is the same on
every machine and however busy it is.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import perdure
from bench.harness import Bench, Figure, Gauge, Run, at_least
from perdure.testing.toy import ToyModel

_DROPS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and '</think>' in m['content'] %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
_SUBAGENTS = 12


def computed(run: Run) -> Iterator[Figure]:
    turns = run.pick(16, 6)
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "drops.jinja"
        template.write_text(_DROPS, encoding="utf-8")
        new = _new_tokens(turns)
        for slots in (4, 1):
            yield run.compare(
                f"tokens computed before first tokens, as parts of {new:,} new ones, {slots} slots",
                ours=lambda slots=slots: _work(template, turns, slots, settle=4096) / new,  # type: ignore[misc]
                peer=lambda slots=slots: _work(template, turns, slots, settle=0) / new,  # type: ignore[misc]
                against="the same without settling",
                unit="x",
                gauge=Gauge.COST,
                target=at_least(2.0),
                repeats=1,
            )


def _question(turn: int) -> str:
    return f"Question {turn}: what does the file with number {turn} say about it?"


def _new_tokens(turns: int) -> int:
    """Of the turns behind the first: what the user says, with its marks."""
    return sum(len(f".user\n{_question(turn)}.\n.assistant\n.\n") for turn in range(1, turns))


def _work(template: Path, turns: int, slots: int, settle: int) -> int:
    """Tokens of the main conversation that were computed while its user waited, behind its first turn."""
    messages: list[dict[str, str]] = [{"role": "system", "content": "You are an agent. " * 100}]
    waited = 0
    with perdure.open(ToyModel(), n_ctx=16384, slots=slots, template=template) as rt:
        for turn in range(turns):
            messages.append({"role": "user", "content": _question(turn)})
            reply = rt.chat(messages, settle=settle, max_tokens=400, temperature=0, processors=[_Thinks()])
            messages.append({"role": "assistant", "content": reply.text})
            waited += reply.reuse.computed if turn else 0
            rt.chat_format.prefetcher.wait()
            for agent in range(_SUBAGENTS * turn // turns, _SUBAGENTS * (turn + 1) // turns):
                task = [{"role": "user", "content": f"Subagent {agent}: look for {turn}. " * 20}]
                rt.chat(task, settle=settle, max_tokens=400, temperature=0, processors=[_Thinks()])
            rt.chat_format.prefetcher.wait()
    return waited


class _Thinks:
    """Has the model reason for 200 tokens, answer in 100, and end."""

    def __init__(self) -> None:
        end = ToyModel().tokenize("</think>", special=True) + list(b"The answer. " * 8)
        self._script = [*b"Let me see. " * 16, *end, *ToyModel().tokenize("<|im_end|>", special=True)]
        self._said = 0

    def __call__(self, tokens: object, logits: perdure.LogitsView) -> NDArray[np.float32]:
        row = np.full(len(logits), -50.0, np.float32)
        row[self._script[min(self._said, len(self._script) - 1)]] = 50.0
        self._said += 1
        return row


main = Bench("settling", [computed])
