"""Sequences of calls by two keys and a client that drops: no crash, no 500, no foreign word (H5, I2, C13)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decode.observed import toy
from perdure import Message
from perdure.chat.normaliser import MessageNormaliser, Normalised
from server.fuzzing import fuzz, fuzzed

SOAK_SECONDS = 3600.0


def test_sequences_of_calls_by_two_keys_cross_nowhere_h5(tmp_path: Path) -> None:
    """H5."""
    with fuzzed(toy(), tmp_path / "store") as fuzzer:
        fuzzer.run(12, start=1)
    assert fuzzer.counts.statuses[200] > 0
    assert fuzzer.counts.dropped > 0


def test_the_fuzzer_finds_a_word_of_nobody_c13(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C13: with a word planted behind every message, no sequence passes."""
    normalise = MessageNormaliser.normalise

    def foreign(self: MessageNormaliser, messages: Sequence[Message], *args: Any, **more: Any) -> Normalised:
        said = replace(messages[-1], content=f"{messages[-1].content} plum")
        return normalise(self, [*messages[:-1], said], *args, **more)

    with fuzzed(toy(), tmp_path / "store") as fuzzer:
        for seed in range(5):
            with monkeypatch.context() as patch:
                patch.setattr(MessageNormaliser, "normalise", foreign)
                with pytest.raises(AssertionError, match=r"interleaved.*500"):
                    fuzzer.interleave(random.Random(seed))


def test_the_fuzzer_finds_a_word_of_another_conversation_c13(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C13, Y1: what a session may hold of its own client is not held against another client's words."""
    with fuzzed(toy(), tmp_path / "store") as fuzzer, monkeypatch.context() as patch:
        # Whole before it is changed: names of conversations are made with the key, too.
        pytest.importorskip("perdure.ext.agents.named_conversations", exc_type=ImportError)
        patch.setattr("perdure.ext.agents.agent_conversation.CACHE_KEY", "none:")
        with pytest.raises(AssertionError, match="chat/completions, prompt_cache_key, dropped"):
            fuzzer.interleave(random.Random(196))


@pytest.mark.soak
def test_sequences_of_calls_by_two_keys_for_long_h5_c13(
    zoo_path: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """H5."""
    with fuzzed(zoo_path("llama"), tmp_path / "store", threads=1, isolated=True) as fuzzer:
        fuzz(fuzzer, seconds=SOAK_SECONDS, told=lambda line: None)
    with capsys.disabled():
        print(f"\nserver fuzzer: {fuzzer.counts}")
