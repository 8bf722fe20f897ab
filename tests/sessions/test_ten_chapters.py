"""A book in chapters: one session that is written by many processes, folded, put to sleep, and killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import models

WRITER = """
import json, sys
import perdure
from perdure.cache.tiers.tiered import Rates

# A small model computes as fast as a busy disk reads, and is then right to. Here what is kept is read.
Rates.cost = lambda *_: 0.0
wanted = json.loads(sys.argv[1])
chapter, parts, tokens = (wanted.pop(name) for name in ("chapter", "parts", "tokens"))
with perdure.open(**wanted, slots=1) as rt:
    book = rt.session("book", system="You write a long novel.", overflow="fold")
    for part in range(parts):
        if part == 1:
            book.sleep()
        text = f"Chapter {chapter}, part {part + 1}: go on with the story."
        asked = {"max_tokens": tokens, "ignore_eos": True, "seed": part}
        try:
            reply = book.say(text, **asked)
        except perdure.SessionError:
            # A small model may not come to an end with its summary.
            book.fold(summary="So far: " + book.history()[-1].reply.content[:200])
            reply = book.say(text, **asked)
        told = [reply.text, reply.usage.completion_tokens, reply.kept, reply.reuse.reused, reply.reuse.why]
        print(json.dumps(told), flush=True)
"""


class Book:
    """Chapters that were written so far: what each writer said that it has committed."""

    def __init__(self, model: Path, store: Path, *, n_ctx: int, tokens: int, threads: int) -> None:
        self._wanted = {"model": str(model), "store": str(store), "n_ctx": n_ctx, "tokens": tokens}
        self._threads = threads
        self.acknowledged: list[str] = []
        self.tokens = 0
        self.kills = 0

    def write(self, chapter: int, parts: int, *, kill_after: int | None = None) -> None:
        """A chapter in a separate process, which is killed behind so many parts, in the midst of one."""
        wanted = {**self._wanted, "chapter": chapter, "parts": parts, "threads": self._threads}
        command = [sys.executable, "-c", WRITER, json.dumps(wanted)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
            for count, (text, tokens, kept, reused, why) in enumerate(self._lines(process), start=1):
                assert kept, f"chapter {chapter}, part {count}"
                assert reused > 0 or not self.acknowledged, (
                    f"chapter {chapter}, part {count} was all computed: {why}"
                )
                self.acknowledged.append(text)
                self.tokens += tokens
                if count == kill_after:
                    process.kill()
                    self.kills += 1
                    break
        assert process.returncode == (0 if kill_after is None else -9)

    def _lines(self, process: subprocess.Popen[str]) -> Iterator[Any]:
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line)


def read_back(book: Book, model: Path, store: Path, n_ctx: int, threads: int) -> list[str]:
    """Every reply of the book, and that it goes on warm as it does cold."""
    settings: dict[str, Any] = {"n_ctx": n_ctx, "slots": 1, "threads": threads, "exact": True}
    with perdure.open(model, store=store, **settings) as rt:
        session = rt.session("book")
        turns = session.history()
        assert any(turn.kind == "fold" for turn in turns), "the context was never full"
        warm = session.fork("warm").say("The end?", max_tokens=8, temperature=0, ignore_eos=True)
        rt.cache.clear()
        cold = session.fork("cold").say("The end?", max_tokens=8, temperature=0, ignore_eos=True)
        assert warm.text == cold.text
        return [turn.reply.content or "" for turn in turns if turn.kind == "turn" and turn.reply is not None]


def check_whole(replies: list[str], book: Book) -> None:
    """What was acknowledged is all there, in order; besides, at most one reply for each kill, which was
    committed before anybody heard of it."""
    rest = iter(replies)
    for number, text in enumerate(book.acknowledged):
        assert any(reply == text for reply in rest), f"reply {number} is gone"
    assert len(replies) <= len(book.acknowledged) + book.kills


def run(
    model: Path, store: Path, *, chapters: int, parts: int, tokens: int, n_ctx: int, threads: int
) -> Book:
    from perdure.ext.upkeep.store import verify

    book = Book(model, store, n_ctx=n_ctx, tokens=tokens, threads=threads)
    for chapter in range(1, chapters + 1):
        book.write(chapter, parts, kill_after=parts - 1 if chapter % 3 == 0 else None)
    check_whole(read_back(book, model, store, n_ctx, threads), book)
    assert verify(store, lambda *_: None).sound
    return book


@pytest.mark.extension("upkeep")
def test_d1_three_chapters_outlive_folds_sleeps_restarts_and_a_kill(
    zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """D1: no committed turn is lost, and what is warm equals what is cold."""
    book = run(zoo_path("llama-brief"), tmp_path / "s", chapters=3, parts=4, tokens=40, n_ctx=768, threads=1)
    assert (len(book.acknowledged), book.kills) == (11, 1)


@pytest.mark.extension("upkeep")
@pytest.mark.soak
@pytest.mark.model
def test_ten_chapters_of_a_real_model_are_read_back_whole(tmp_path: Path) -> None:
    """20,000 tokens and more of one session, with a kill in every third chapter."""
    model = models.path()
    book = run(model, tmp_path / "s", chapters=10, parts=6, tokens=400, n_ctx=4096, threads=2)
    assert book.tokens >= 20_000
