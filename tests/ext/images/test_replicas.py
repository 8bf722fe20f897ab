"""An image is sent to one replica, and its session goes on at another one."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import perdure
from ext.cluster.servers import PostgresServer
from perdure import ChatReply, Image, Message, Runtime
from perdure.ext.images.reader import StoredImages
from server.test_command import Running, serving

from .pictures import picture

Toy = Callable[[str], tuple[Path, Path]]

PICTURE = Image(picture(seed=4))
SHOWN: Any = {"role": "user", "content": [PICTURE, "what is in it?" + 100 * " w1"]}
OTHER_KINDS = [
    pytest.param(each, marks=pytest.mark.full) for each in ("gemma3", "qwen2vl", "qwen3vl", "qwen35")
]


@contextmanager
def replica(model: Path, store: str | Path, *blocks: str) -> Iterator[Runtime]:
    with perdure.open(
        model, store=store, blocks=list(blocks) or None, n_ctx=2048, slots=2, threads=1, exact=True
    ) as rt:
        yield rt


def say(rt: Runtime, said: Any) -> ChatReply:
    return rt.session("walk").say(said, max_tokens=8, temperature=0)


def encoded(rt: Runtime) -> int:
    reader = rt.chat_format.image_reader()
    assert isinstance(reader, StoredImages)
    return reader.encoded


@pytest.mark.parametrize("kind", ["llava", *OTHER_KINDS])
def test_n1_e1_e5_a_session_with_an_image_goes_on_at_another_replica(
    kind: str, toy: Toy, tmp_path: Path, postgres: PostgresServer
) -> None:
    """Where state is shared, it encodes nothing and computes no token of the image; else it encodes the file
    that the session has, once. The replies are those of a machine alone."""
    model = toy(kind)[0]
    with replica(model, tmp_path / "alone") as rt:
        replies = [say(rt, said) for said in (SHOWN, "and then?", "so?")]
    folders = [tmp_path / name for name in ("one", "two", "three")]
    url, shared = postgres.url(folders[0]), f"file://{tmp_path / 'shared'}"
    urls = [url.replace("one", folder.name) for folder in folders]
    with replica(model, urls[0], shared) as one:
        assert say(one, SHOWN).tokens == replies[0].tokens
        assert encoded(one) == 1
    with replica(model, urls[1], shared) as warm:
        reply = say(warm, "and then?")
        assert reply.tokens == replies[1].tokens
        assert reply.reuse.reused >= 128
        assert encoded(warm) == 0
        assert not (folders[1] / "media").exists()
    with replica(model, urls[2]) as cold:
        reply = say(cold, "so?")
        assert reply.tokens == replies[2].tokens
        assert reply.reuse.reused == 0
        assert encoded(cold) == 1
        # It is known there from now on: also by its digest alone.
        named = Message.parse(Message.parse(SHOWN).to_dict())
        assert cold.chat([named], max_tokens=8, temperature=0).tokens == replies[0].tokens
        assert encoded(cold) == 1


def ask(running: Running, said: Any) -> Any:
    body = {
        "messages": [{"role": "user", "content": said}],
        "max_tokens": 8,
        "temperature": 0,
        "perdure": {"session": "walk"},
    }
    with running.client() as client:
        return client.post("/v1/chat/completions", json=body).raise_for_status().json()


@pytest.mark.full
def test_e1_a_second_server_on_one_store_encodes_nothing(toy: Toy, tmp_path: Path) -> None:
    model, store, options = toy("llava")[0], tmp_path / "store", ("--ctx", "2048", "--slots", "2", "--exact")
    assert PICTURE.data is not None
    url = f"data:image/png;base64,{base64.b64encode(PICTURE.data).decode()}"
    shown = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is in it?"}]

    def encodings() -> dict[Path, int]:
        return {path: path.stat().st_ino for path in store.glob("media/*/??/*")}

    with (
        serving(model, "--store", str(store), *options) as one,
        serving(model, "--store", str(store), *options) as two,
    ):
        ask(one, shown)
        before = encodings()
        assert len(before) == 2
        assert ask(two, "and then?")["usage"]["prompt_tokens"] > 128
        assert ask(two, shown)["usage"]["prompt_tokens"] > 192
        assert encodings() == before
