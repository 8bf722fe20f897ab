"""Agents: tokens that are computed before first tokens, for an agent with subagents, compactions, changing
tools and a line that is another at every turn; on 4 slots, by three templates.

On the toy engine, whose tokens are bytes: what is counted is work, which is the same on every machine and
however busy it is. llama-server runs the same trace with a tiny model, and says itself how many tokens it
read.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import perdure
from bench.agents.peer import llama_server
from bench.agents.trace import REASONING, Ask, new_tokens, trace
from bench.child import PeerMissingError
from bench.harness import Bench, Figure, Gauge, Run, at_most
from perdure.testing.toy import ToyModel

SLOTS = 4
_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
_OPENS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEMPLATES = {
    "one that writes all as it came": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if loop.first %}"
        + _TOOLS
        + "{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}"
        + _OPENS
    ),
    "one that moves system messages to the front": (
        "<|im_start|>system\n"
        + _TOOLS
        + "{% for m in messages if m['role'] == 'system' %}{{ m['content'] }}{% endfor %}<|im_end|>\n"
        "{% for m in messages if m['role'] != 'system' %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
        "<|im_end|>\n{% endfor %}" + _OPENS
    ),
    "one that drops reasoning": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if loop.first %}"
        + _TOOLS
        + "{% endif %}{% if m['role'] == 'assistant' and '</think>' in m['content'] %}"
        "{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    ),
}


def computed(run: Run) -> Iterator[Figure]:
    asks = trace()
    new = new_tokens(asks)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in TEMPLATES.items():
            template = Path(folder) / "template.jinja"
            template.write_text(text, encoding="utf-8")
            drops = "drops" in name
            waited, in_all = _work(asks, template, drops=drops)
            # Behind a reply whose reasoning is dropped, the answer is another state: it has to be read.
            least = sum(new) + drops * sum(len(ask.answer) for ask in asks if ask.goes_on)
            for what, ours, against, limit in (
                ("before first tokens", waited, sum(new), 1.05),
                ("in all", in_all, least, 1.10),
            ):
                yield run.compare(
                    f"tokens computed {what}, template: {name}",
                    ours=lambda ours=ours: float(ours),  # type: ignore[misc]
                    peer=lambda against=against: float(against),  # type: ignore[misc]
                    against="those that are new" if what != "in all" else "the least in hindsight",
                    unit="tokens",
                    gauge=Gauge.RATE,
                    target=at_most(limit),
                    repeats=1,
                )
            if run.quick:
                # It takes minutes.
                continue
            try:
                ratio = llama_server(asks, new, text, drops=drops)
            except PeerMissingError:
                continue
            yield run.compare(
                f"tokens computed before first tokens as parts of the new ones, template: {name}",
                ours=lambda ours=waited: ours / sum(new),  # type: ignore[misc]
                peer=lambda ratio=ratio: ratio,  # type: ignore[misc]
                against="llama-server",
                unit="x",
                gauge=Gauge.COST,
                target=at_most(1e9),
                repeats=1,
            )


def _work(asks: Sequence[Ask], template: Path, *, drops: bool) -> tuple[int, int]:
    """Tokens computed while a user waited, and in all, what was read while idle included."""
    waited = 0
    with perdure.open(ToyModel(), n_ctx=16_384, slots=SLOTS, template=template) as rt:
        for ask in asks:
            reply = rt.chat(
                ask.messages,
                tools=list(ask.tools),
                tool_choice="none",
                stable_prefix=True,
                settle=4096,
                max_tokens=1000,
                temperature=0,
                processors=[_Says(ask.answer, drops=drops)],
            )
            if reply.text.strip() != ask.answer.strip():
                raise RuntimeError(f"the reply was {reply.text[:80]!r}, expected {ask.answer[:80]!r}")
            waited += reply.reuse.computed
            rt.chat_format.prefetcher.wait()
        return waited, rt.cache.stats().computed_tokens


class _Says:
    """Has the model say an answer, after its reasoning where the template opens one, and end."""

    def __init__(self, answer: str, *, drops: bool) -> None:
        model = ToyModel()
        thought = [*REASONING.encode(), *model.tokenize("</think>", special=True)] if drops else []
        self._script = [*thought, *answer.encode(), *model.tokenize("<|im_end|>", special=True)]
        self._said = 0

    def __call__(self, tokens: object, logits: perdure.LogitsView) -> NDArray[np.float32]:
        row = np.full(len(logits), -50.0, np.float32)
        row[self._script[min(self._said, len(self._script) - 1)]] = 50.0
        self._said += 1
        return row


main = Bench("agents", [computed])
