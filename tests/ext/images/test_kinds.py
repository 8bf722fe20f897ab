"""Seven kinds of models through one conversation over HTTP, and what tells two files apart (E1, E2, E3)."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import perdure
from perdure import Image, Sound
from perdure.ext.images.media_store import MediaStore
from server.live_server import live_server

from .pictures import as_file, picture, pixels, sound
from .test_prompts import KINDS

Toy = Callable[[str], tuple[Path, Path]]

BEHIND = "here" + 100 * " w1"
QUICK = ("qwen35",)
EVERY = [each if each in QUICK else pytest.param(each, marks=pytest.mark.full) for each in KINDS]


@contextmanager
def serving(model: Path, store: Path) -> Iterator[httpx.Client]:
    with (
        perdure.open(model, store=store, n_ctx=6144, slots=2, threads=1, exact=True) as runtime,
        live_server(runtime) as server,
        server.client() as client,
    ):
        yield client


def part(data: bytes) -> dict[str, Any]:
    text = base64.b64encode(data).decode()
    if data.startswith(b"RIFF"):
        return {"type": "input_audio", "input_audio": {"data": text, "format": "wav"}}
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}


def shown(*parts: bytes | str) -> list[dict[str, Any]]:
    return [part(each) if isinstance(each, bytes) else {"type": "text", "text": each} for each in parts]


def say(client: httpx.Client, session: str, content: Any) -> dict[str, Any]:
    turn = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
    path = f"/v1/sessions/{session}/turns"
    answer: dict[str, Any] = client.post(path, json=turn).raise_for_status().json()
    return answer


def post(client: httpx.Client, path: str, **body: Any) -> None:
    client.post(f"/v1/sessions{path}", json=body).raise_for_status()


def encodings(store: Path) -> int:
    return len(list((store / "media" / "encoded").glob("??/*")))


@pytest.mark.parametrize("kind", EVERY)
def test_e1_e2_s6_a_conversation_over_http_has_the_replies_of_a_cold_one(
    kind: str, toy: Toy, tmp_path: Path
) -> None:
    """Forked, rewound to before a medium, and gone on with by another server: each file is encoded once."""
    model, store = toy(kind)[0], tmp_path / "store"
    first, second = (sound(1), sound(2)) if kind == "qwen2a" else (picture(seed=1), picture(seed=2))
    opening, both = shown("see ", first, BEHIND), shown(first, second, "which?")
    with serving(model, store) as client:
        post(client, "", name="walk")
        say(client, "walk", opening)
        now = say(client, "walk", "and now?")
        post(client, "/walk/fork", name="branch", turn=1)
        other = say(client, "branch", shown(second, "two?"))
        post(client, "/branch/rewind", turns=1)
        rewound = say(client, "branch", both)
        assert encodings(store) == 2
    with serving(model, store) as client:
        then = say(client, "walk", "and then?")
        assert then["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert encodings(store) == 2
    # Each path alone, and no state is kept from turn to turn.
    for path, expected in (
        ((opening, "and now?", "and then?"), then),
        ((opening, shown(second, "two?")), other),
        ((opening, both), rewound),
        ((opening, "and now?"), now),
    ):
        with serving(model, tmp_path / "cold") as client:
            post(client, "", name="walk")
            for said in path:
                client.delete("/v1/cache").raise_for_status()
                reply = say(client, "walk", said)
            assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert reply["choices"][0]["message"] == expected["choices"][0]["message"]
            assert reply["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
            client.delete("/v1/sessions/walk").raise_for_status()


@pytest.mark.parametrize("kind", EVERY)
def test_e3_files_that_look_alike_share_nothing(kind: str, toy: Toy, tmp_path: Path) -> None:
    """One pixel or sample apart, and the same pixels in another shape."""
    if kind == "qwen2a":
        data = bytearray(sound(1))
        data[len(data) // 2] ^= 0x40
        files: list[Image] = [Sound(sound(1)), Sound(bytes(data))]
    else:
        changed = pixels()
        changed[80, 60] ^= 0xFF
        files = [Image(as_file(each)) for each in (pixels(), changed, pixels().reshape(120, 160, 3))]
    with perdure.open(toy(kind)[0], store=tmp_path, n_ctx=2048, slots=2, threads=1, exact=True) as rt:
        asked: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "logprobs": 2}
        replies = [
            rt.chat([{"role": "user", "content": [file, BEHIND]}], **asked)
            for _ in range(2)
            for file in files
        ]
        for file, again in zip(replies, replies[len(files) :], strict=False):
            assert again.raw.logprobs == file.raw.logprobs
            assert again.reuse.reused > 0
        assert len({repr(reply.raw.logprobs) for reply in replies}) == len(files)
        assert all(reply.reuse.reused < 64 for reply in replies[: len(files)])


@pytest.mark.full
def test_e1_forty_images_are_encoded_once_in_one_message_and_in_a_conversation(
    toy: Toy, tmp_path: Path
) -> None:
    model, images = toy("llava")[0], [Image(picture(seed=seed)) for seed in range(40)]
    asked: dict[str, Any] = {"max_tokens": 4, "temperature": 0}

    def opened() -> perdure.Runtime:
        return perdure.open(model, store=tmp_path, n_ctx=6144, slots=2, threads=1, exact=True)

    with opened() as rt:
        at_once = rt.session("once").say({"role": "user", "content": [*images, BEHIND]}, **asked)
        assert at_once.usage.media_tokens == 2560
        for number, image in enumerate(images):
            reply = rt.session("walk").say({"role": "user", "content": [image, f"w{number}?"]}, **asked)
        assert reply.usage.media_tokens == 2560
        assert encodings(tmp_path) == MediaStore(tmp_path).usage().media == 40
    with opened() as rt:
        for name in ("once", "walk"):
            reply = rt.session(name).say("and now?", **asked)
            assert reply.reuse.reused >= 2560
        assert encodings(tmp_path) == 40
