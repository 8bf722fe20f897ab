"""A new kind of memory is one new class: it says which parts it has, and everything else follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

import perdure
from perdure import CannotRewindError, MemorySpec, Runtime
from perdure.testing.toy import ToyModel

TEXT = "a text of which some is read again and again, until it is known by heart. "
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6}


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowAndState(MemorySpec):
    """Local attention beside recurrent layers, as Griffin has them. Nothing in perdure knows of it."""

    name: ClassVar[str] = "griffin"
    has_rows: ClassVar[bool] = False
    has_window: ClassVar[bool] = True
    has_recurrent_state: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsWindowAndState(WindowAndState):
    """The same beside layers of full attention."""

    name: ClassVar[str] = "everything"
    has_rows: ClassVar[bool] = True


kinds = pytest.mark.parametrize("kind", [WindowAndState, RowsWindowAndState], ids=lambda kind: kind.name)


def opened(kind: type[MemorySpec], **settings: Any) -> Runtime:
    return perdure.open(ToyModel(kind), n_ctx=512, template="chatml", **settings)


def cold(kind: type[MemorySpec], prompt: str) -> str:
    with opened(kind, slots=1, cache=0) as rt:
        return rt.generate(prompt, **GREEDY).text


@kinds
@pytest.mark.parametrize("slots", [1, 3])
def test_warm_equals_cold_for_a_kind_of_memory_that_nobody_knew(kind: type[MemorySpec], slots: int) -> None:
    """W≡C, K2: prompts that go on, go back and part, in slots and swapped out of them."""
    prompts = [
        TEXT * 2,
        TEXT * 3,
        TEXT * 2 + "and more",
        TEXT,
        TEXT * 3,
        "Other. " + TEXT,
        TEXT * 2 + "and more",
    ]
    with opened(kind, slots=slots, cache=1 << 24) as rt:
        reused = 0
        for prompt in prompts:
            reply = rt.generate(prompt, **GREEDY)
            assert reply.text == cold(kind, prompt)
            reused += reply.reuse.reused
        assert reused > 0


@kinds
def test_its_sessions_sleep_fork_and_wake(kind: type[MemorySpec], tmp_path: Any) -> None:
    said = ["Hello", "and then", "and after that"]
    with opened(kind, store=tmp_path) as rt:
        session = rt.session("one")
        texts = [session.say(text, **GREEDY).text for text in said]
        session.sleep()
    with opened(kind, store=tmp_path) as rt:
        woken = rt.session("one", create=False)
        fork = woken.fork("two")
        fork.rewind(turns=1)
        again = fork.say(said[-1], **GREEDY)
        assert again.text == texts[-1]
        assert woken.say("more", **GREEDY).reuse.reused > 0


@kinds
def test_it_cannot_be_cut_and_says_so_by_its_name(kind: type[MemorySpec]) -> None:
    with ToyModel(kind).context(n_ctx=64) as ctx:
        ctx.decode(list(range(32, 52)))
        with pytest.raises(CannotRewindError, match=f"a {kind.name} memory cannot go from 20"):
            ctx.truncate(10)
        point = ctx.checkpoint()
        ctx.decode([60, 61])
        ctx.restore(point)
        assert ctx.length(0) == 20
