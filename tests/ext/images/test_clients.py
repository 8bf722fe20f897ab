"""Vendors' own clients send pictures, everything is killed, and the next turn encodes nothing (E1, A1)."""

from __future__ import annotations

import base64
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from server.live_server import PATIENCE
from server.test_command import Running, serving

from .pictures import picture

Toy = Callable[[str], tuple[Path, Path]]

PICTURE = picture(seed=4)
BASE64 = base64.b64encode(PICTURE).decode()
LONG = "what is in it?" + 100 * " w1"
OPTIONS = ("--ctx", "2048", "--slots", "2", "--exact")


@contextmanager
def killed(model: Path, store: Path, *options: str) -> Iterator[Running]:
    """A server that is ended by SIGKILL, with its engine and its encoder."""
    with serving(model, "--store", str(store), *OPTIONS, *options, start_new_session=True) as running:
        try:
            yield running
        finally:
            os.killpg(running.process.pid, signal.SIGKILL)


def encoded(store: Path) -> dict[Path, int]:
    """What was encoded. A file that is encoded again is another one."""
    paths = [path for kind in ("rows", "encoded") for path in (store / "media" / kind).glob("??/*")]
    return {path: path.stat().st_ino for path in paths}


def wait_for_disk(store: Path, tokens: int) -> None:
    """Until that much state is written and listed, which is done when the engine is idle."""
    ends = time.monotonic() + PATIENCE
    while 64 * sum(map(listed, store.rglob("index.sqlite"))) < tokens:
        assert time.monotonic() < ends
        time.sleep(0.05)


def listed(index: Path) -> int:
    """The blocks that a process finds after this one was killed."""
    with closing(sqlite3.connect(f"file:{index}?mode=ro", uri=True)) as database:
        try:
            return int(database.execute("SELECT count(*) FROM block").fetchone()[0])
        except sqlite3.OperationalError:
            return 0


def by_openai(running: Running, first: bool) -> tuple[str, int, int]:
    image: Any = {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{BASE64}", "detail": "high"},
    }
    said: Any = [image, {"type": "text", "text": LONG}] if first else "and then?"
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="-", max_retries=0) as client:
        reply = client.chat.completions.create(
            model="llava",
            messages=[{"role": "user", "content": said}],
            max_tokens=8,
            temperature=0,
            extra_body={"perdure": {"session": "walk"}},
        )
    usage = reply.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    cached = usage.prompt_tokens_details.cached_tokens or 0
    return reply.choices[0].message.content or "", usage.prompt_tokens, cached


def by_anthropic(running: Running, first: bool) -> tuple[str, int, int]:
    source: Any = {"type": "base64", "media_type": "image/png", "data": BASE64}
    said: Any = (
        [{"type": "image", "source": source}, {"type": "text", "text": LONG}] if first else "and then?"
    )
    with anthropic.Anthropic(base_url=running.url, api_key="-", max_retries=0) as client:
        reply = client.messages.create(
            model="llava",
            messages=[{"role": "user", "content": said}],
            max_tokens=8,
            extra_body={"temperature": 0, "perdure": {"session": "walk"}},
        )
    usage: Any = reply.usage
    cached = usage.cache_read_input_tokens or 0
    block: Any = reply.content[0]
    return block.text, usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0), cached


def by_responses(running: Running, first: bool) -> tuple[str, int, int]:
    image: Any = {"type": "input_image", "image_url": f"data:image/png;base64,{BASE64}", "detail": "auto"}
    said: Any = [image, {"type": "input_text", "text": LONG}] if first else "and then?"
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="-", max_retries=0) as client:
        conversations = httpx.get(f"{running.url}/v1/sessions", trust_env=False).json()["data"]
        named = [each["name"] for each in conversations if each["name"].startswith("conv_")]
        conversation = named[0] if named else client.conversations.create().id
        reply = client.responses.create(
            model="llava",
            input=[{"role": "user", "content": said}],
            conversation=conversation,
            max_output_tokens=8,
            temperature=0,
        )
    assert reply.usage is not None
    return reply.output_text, reply.usage.input_tokens, reply.usage.input_tokens_details.cached_tokens


@pytest.mark.parametrize(
    "ask", [by_openai, by_anthropic, by_responses], ids=["openai", "anthropic", "responses"]
)
def test_a_client_goes_on_after_everything_was_killed(
    toy: Toy, tmp_path: Path, ask: Callable[[Running, bool], tuple[str, int, int]]
) -> None:
    model, store = toy("llava")[0], tmp_path / "store"
    with killed(model, store) as running:
        _, prompt, _ = ask(running, True)
        wait_for_disk(store, prompt - 128)
    before = encoded(store)
    assert len(before) == 2
    with killed(model, store) as running:
        text, again, cached = ask(running, False)
    assert encoded(store) == before
    assert again > prompt
    # The image, and all whole steps behind it.
    assert cached >= prompt - 128
    with killed(model, tmp_path / "cold") as running:
        ask(running, True)
        assert ask(running, False)[0] == text


def test_an_ollama_client_goes_on_after_everything_was_killed(toy: Toy, tmp_path: Path) -> None:
    """It sends its whole history again; the image in it is found by its bytes."""
    model, store = toy("llava")[0], tmp_path / "store"
    options = {"temperature": 0, "num_predict": 8}
    history: list[Any] = [{"role": "user", "content": LONG, "images": [PICTURE]}]
    texts = []
    before: dict[Path, int] = {}
    for _ in range(2):
        with killed(model, store) as running:
            client = ollama.Client(host=running.url)
            texts.append(client.chat("llava", history, options=options).message.content)
            vars(client)["_client"].close()
        assert not before or encoded(store) == before
        before = encoded(store)
        history += [{"role": "assistant", "content": texts[-1]}, {"role": "user", "content": "and then?"}]
    assert len(before) == 2
    assert all(texts)
