"""Images in messages: encoded once, kept by sessions, never mistaken for text (E1, E2, E3, E5)."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import (
    EngineDiedError,
    Image,
    InvalidInputError,
    Message,
    PerdureError,
    Runtime,
    SessionError,
    Sound,
)
from perdure.ext.images import reader
from perdure.ext.images.encoder import Encoder, Patience
from perdure.ext.images.media_store import MediaStore
from perdure.spi.runtime import ImageEncoded

from .pictures import picture, sound
from .toys import tower

Toy = Callable[[str], tuple[Path, Path]]

BEHIND = " here" + 40 * " w1" + "?"
"""Exact mode resumes after whole steps, so the image is behind one of them."""
ASK: Any = {"max_tokens": 10, "temperature": 0.0}


@pytest.fixture(scope="module")
def model(toy: Toy) -> Path:
    return toy("llava")[0]


def opened(model: Path, store: Path | None, *, isolated: bool = False) -> Runtime:
    return perdure.open(model, store=store, n_ctx=4096, slots=2, threads=1, exact=True, isolated=isolated)


def clear_files(store: Path) -> None:
    with closing(sqlite3.connect(store / "sessions.sqlite")) as db, db:
        db.execute("DELETE FROM turn_file")
        db.execute("DELETE FROM file")


def seen(*parts: str | Image) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def encoded(rt: Runtime) -> int:
    """Files that were encoded so far."""
    usage = MediaStore(Path(str(rt.backend.storage.folder))).usage()
    return usage.media


def test_e1_e2_a_conversation_with_images_goes_on_anywhere(model: Path, tmp_path: Path) -> None:
    """After a restart, in a fork, after a rewind, in a stateless chat: the bits of a cold run; each image is
    encoded once, and a later turn computes no image token."""
    first, second = Image(picture(seed=1)), Image(picture(seed=2))
    store = tmp_path / "store"
    with opened(model, store) as rt:
        session = rt.session("walk")
        one = session.say(seen("what is ", first, BEHIND), **ASK)
        two = session.say("and now?", **ASK)
        assert one.usage.prompt_tokens > 64
        assert two.reuse.reused >= 128
        assert encoded(rt) == 1
    # No encoder, no projector and no file is needed to go on.
    shutil.rmtree(store / "media" / "encoded")
    clear_files(store)
    with opened(model, store) as rt:
        session = rt.session("walk")
        three = session.say("and then?", **ASK)
        assert three.reuse.reused >= 128
        fork = session.fork("other")
        four = fork.say(seen(second, first, "both?"), **ASK)
        assert encoded(rt) == 2
        fork.rewind(turns=1)
        five = fork.say(seen(second, "one?"), **ASK)
        assert encoded(rt) == 2
        assert [said.images for turn in session.history() for said in turn.messages if said.images] == [
            ((8, first),)
        ]
    messages: list[Any] = [
        seen("what is ", first, BEHIND),
        {"role": "assistant", "content": one.text},
        {"role": "user", "content": "and now?"},
    ]
    with opened(model, tmp_path / "cold") as rt:
        assert rt.session("walk").say(seen("what is ", first, BEHIND), **ASK).tokens == one.tokens
        session = rt.session("again")
        for said in (messages[0], "and now?", "and then?"):
            reply = session.say(said, **ASK)
        assert reply.tokens == three.tokens
        fork = session.fork("other")
        assert fork.say(seen(second, "one?"), **ASK).tokens == five.tokens
        assert rt.chat(messages[:1], **ASK).tokens == one.tokens
        assert four.tokens != five.tokens


@pytest.mark.parametrize("kind", ["llava", "qwen2vl", "qwen35"])
def test_c4_a_full_context_drops_an_image_as_a_whole(kind: str, toy: Toy, tmp_path: Path) -> None:
    """With overflow shift the oldest tokens go, and of an image all or none."""
    said = [seen("w1 " * 40, Image(picture(seed=1)), " w2")]
    with perdure.open(toy(kind)[0], store=tmp_path / "store", n_ctx=512, slots=1, threads=1) as rt:
        reply = rt.chat(said, overflow="shift", max_tokens=300, temperature=0, ignore_eos=True, loop_guard=0)
        assert reply.usage.completion_tokens == 300
        assert reply.shifted > 0


def test_e3_two_images_are_two(model: Path, tmp_path: Path) -> None:
    with opened(model, tmp_path / "store") as rt:
        replies = {
            rt.chat([seen("what is ", Image(picture(seed=seed)))], **ASK).tokens for seed in range(1, 4)
        }
        assert len(replies) == 3
        assert len({Image(picture(seed=1)), Image(picture(seed=1)), Image(picture(seed=2))}) == 2


def test_what_a_user_types_is_never_an_image(model: Path, tmp_path: Path) -> None:
    image = Image(picture(seed=1))
    mark = f"\ue001{image.digest}\ue001"
    with opened(model, tmp_path / "store") as rt:
        count = rt.count_chat([seen("see ", image)])
        for text in (mark, f"\ue000{mark}", f"<__media__>{mark}\ue000", "\ue001" * 9):
            said = [seen(text)]
            assert not any(
                token < 0 for token in rt.chat_format.prompt([Message.parse(said[0])]).transcript.tokens
            )
            both = [seen("see ", image, text)]
            assert rt.count_chat(both) > count
            tokens = rt.chat_format.prompt([Message.parse(both[0])]).transcript.tokens
            assert sum(token < 0 for token in tokens) == 64
            read = rt.model.detokenize([each for each in tokens if each >= 0])
            assert text in read.replace("▁", "")


def test_e5_rows_that_are_gone_are_encoded_again_and_files_that_are_gone_are_named(
    model: Path, tmp_path: Path
) -> None:
    image = Image(picture(seed=1))
    store = tmp_path / "store"
    with opened(model, store) as rt:
        first = rt.session("walk").say(seen(image, "?"), **ASK)
    shutil.rmtree(store / "blocks")
    (store / "index.sqlite").unlink()
    [rows] = (store / "media" / "rows").glob("??/*")
    rows.write_bytes(rows.read_bytes()[:-9])
    with opened(model, store) as rt:
        # The next message that shows it has it encoded again.
        assert rt.chat([seen(image, "?")], **ASK).tokens == first.tokens
        fork = rt.session("walk").fork("other")
        fork.rewind(turns=1)
        kept = Message.parse(Message.parse(seen(image, "?")).to_dict())
        assert kept.images[0][1].data is None
        assert fork.say(kept, **ASK).tokens == first.tokens
    media = MediaStore(store)
    with opened(model, store) as rt:
        for name in rt.sessions.list():
            rt.sessions.delete(name.name)
        media.forget_rows()
        with pytest.raises(SessionError, match=image.digest[:12]):
            rt.chat([kept], **ASK)


def test_one_namespace_cannot_name_the_image_of_another(model: Path, tmp_path: Path) -> None:
    image = Image(picture(seed=1))
    kept = Message.parse(Message.parse(seen(image)).to_dict())
    with opened(model, tmp_path / "store") as rt:
        rt.chat([seen(image)], namespace="one", **ASK)
        rt.chat([kept], namespace="one", **ASK)
        for other in ("", "two"):
            with pytest.raises(SessionError, match="not in the store"):
                rt.chat([kept], namespace=other, **ASK)


def test_what_cannot_be_seen_is_refused_in_words(model: Path, tmp_path: Path) -> None:
    image = Image(picture())
    with opened(model, None) as rt, pytest.raises(InvalidInputError, match="store"):
        rt.chat([seen(image)], **ASK)
    blind = tmp_path / "blind.gguf"
    shutil.copy(model, blind)
    with opened(blind, tmp_path / "store") as rt:
        with pytest.raises(InvalidInputError, match="projector"):
            rt.chat([seen(image)], **ASK)
        assert rt.chat([seen("hm")], **ASK).tokens
    with opened(model, tmp_path / "other") as rt:
        session = rt.session("walk")
        with pytest.raises(InvalidInputError, match="no image"):
            session.say(seen(Image(b"nothing"), "?"), **ASK)
        assert session.say("go on", **ASK).tokens
        with pytest.raises(InvalidInputError, match="only a user"):
            rt.chat([{"role": "system", "content": [image]}], **ASK)
    with pytest.raises(InvalidInputError, match="cannot be read"):
        Image(tmp_path / "none.png")


def test_a_message_with_images_reads_as_the_same_again(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(picture())
    message = Message.parse(seen("a", Image(path), "bc", Image(picture(seed=8)), Image(path)))
    assert message.content == "abc"
    assert [at for at, _ in message.images] == [1, 3, 3]
    assert Message.parse(message.to_dict()) == message
    for wrong in ([[1]], [[9, "00" * 32]], [[0, "x"]], [[2, "00" * 32], [1, "00" * 32]]):
        with pytest.raises(InvalidInputError):
            Message.parse({"role": "user", "content": "abc", "images": wrong})


def test_e4_y25_a_file_at_which_the_encoder_died_is_not_tried_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = Image(picture(2000, 2000))
    hasty = partial(Encoder, patience=Patience(decode=1e-5))
    with opened(model, tmp_path) as rt:
        with monkeypatch.context() as patched:
            patched.setattr(reader, "Encoder", hasty)
            with pytest.raises(EngineDiedError, match="took more than"):
                rt.chat([seen(large, "what?")], **ASK)
        with pytest.raises(InvalidInputError, match="the encoder died at this image before"):
            rt.chat([seen(large, "what?")], **ASK)


def test_e7_a_known_image_waits_for_no_other(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key's slow file is no delay for another's conversation."""
    known, slow = Image(picture()), Image(picture(seed=9))
    begun, go_on = threading.Event(), threading.Event()
    encode = Encoder.encode

    def slowly(self: Encoder, data: bytes, *rest: Any, **detail: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return encode(self, data, *rest, **detail)

    with opened(model, tmp_path) as rt:
        first = rt.chat([seen(known, "what?")], **ASK)
        monkeypatch.setattr(Encoder, "encode", slowly)
        other = threading.Thread(target=lambda: rt.chat([seen(slow, "what?")], **ASK))
        other.start()
        assert begun.wait(60)
        try:
            assert rt.chat([seen(known, "what?")], **ASK).tokens == first.tokens
        finally:
            go_on.set()
            other.join()


def test_y3_the_file_of_an_image_is_kept_for_sessions_alone(model: Path, tmp_path: Path) -> None:
    image = Image(picture())
    with opened(model, tmp_path) as rt:
        rt.chat([seen(image, "what?")], **ASK)
        assert rt.sessions.store.file("", image.digest) is None
        rt.session("a").append(seen(image, "this"))
        assert rt.sessions.store.file("", image.digest) == image.data


def lose(store: Path, *, files: bool = False) -> None:
    """State and rows are gone."""
    for folder in ("media", "blocks"):
        shutil.rmtree(store / folder)
    (store / "index.sqlite").unlink()
    if files:
        clear_files(store)


@pytest.mark.parametrize(
    "kind",
    ["llava", *(pytest.param(each, marks=pytest.mark.full) for each in ("gemma3", "qwen3vl", "qwen35"))],
)
def test_e5_a_session_goes_on_though_state_and_rows_are_gone(kind: str, toy: Toy, tmp_path: Path) -> None:
    """Its images are encoded again from their files, and the reply is that of a session that lost nothing. A
    file that is gone too is named."""
    model, store = toy(kind)[0], tmp_path / "store"
    image = Image(picture(seed=1))
    with opened(model, store) as rt:
        rt.session("walk").say(seen("see ", image, Image(picture(seed=2)), BEHIND), **ASK)
    shutil.copytree(store, tmp_path / "whole")
    with opened(model, tmp_path / "whole") as rt:
        expected = rt.session("walk").say("and now?", **ASK)
    lose(store)
    with opened(model, store) as rt:
        session = rt.session("walk")
        reply = session.say("and now?", **ASK)
        assert reply.tokens == expected.tokens
        assert reply.reuse.reused == 0 < expected.reuse.reused
        assert reply.kept
        assert encoded(rt) == 2
    lose(store, files=True)
    with opened(model, store) as rt, pytest.raises(SessionError, match=image.digest[:12]):
        rt.session("walk").say("and then?", **ASK)


@pytest.mark.parametrize("isolated", [False, pytest.param(True, marks=pytest.mark.full)])
def test_e5_rows_that_go_while_a_runtime_is_open_are_made_again(
    isolated: bool, model: Path, tmp_path: Path
) -> None:
    """Also for a client that sends its history again, where an event loop waits for the reply, and where the
    engine is another process."""
    said = [seen("see ", Image(picture(seed=1)), Image(picture(seed=2)), BEHIND)]
    with opened(model, tmp_path, isolated=isolated) as rt:
        first = rt.chat(said, **ASK)
        history = [*said, {"role": "assistant", "content": first.text}, {"role": "user", "content": "so?"}]
        expected = rt.chat(history, **ASK)
        for ask in (rt.chat, lambda *said, **more: asyncio.run(rt.achat(*said, **more))):
            rt.cache.clear()
            MediaStore(tmp_path).forget_rows()
            assert ask(history, **ASK).tokens == expected.tokens
            assert encoded(rt) == 2


def test_e3_e5_an_encoder_that_changes_leaves_sessions_as_they_are(toy: Toy, tmp_path: Path) -> None:
    """As long as rows are kept. Where they are gone, the images are read anew with those that it makes."""
    model, projector = (Path(shutil.copy(each, tmp_path)) for each in toy("llava"))
    store, image = tmp_path / "store", Image(picture(seed=1))
    with opened(model, store) as rt:
        rt.session("walk").say(seen("see ", image, BEHIND), **ASK)
        fork = rt.session("walk").fork("fork")
        expected = fork.say("and now?", **ASK)
    tower(projector, "llava", seed=5)
    with opened(model, store) as rt:
        rt.cache.clear()
        assert rt.session("walk").say("and now?", **ASK).tokens == expected.tokens
        assert encoded(rt) == 1
        other = rt.session("other").say(seen("see ", image, BEHIND), **ASK)
        assert encoded(rt) == 2
    lose(store)
    with opened(model, store) as rt:
        reply = rt.session("fork").say("and then?", **ASK)
        assert reply.kept
        assert reply.usage.media_tokens == 64
        assert rt.session("other").say("and now?", **ASK).usage.media_tokens == 64
        assert encoded(rt) == 1
        again = rt.session("again").say(seen("see ", image, BEHIND), **ASK)
        assert again.tokens == other.tokens


def test_c12_e5_a_pending_reply_goes_on_though_state_and_rows_are_gone(model: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    asked: Any = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    with opened(model, tmp_path / "whole") as rt:
        expected = rt.session("walk").say(seen("see ", Image(picture(seed=1)), BEHIND), **asked)
    with opened(model, store) as rt:
        stream = rt.session("walk").submit(seen("see ", Image(picture(seed=1)), BEHIND), **asked)
        for _ in zip(range(9), stream, strict=False):
            pass
        stream.interrupt()
        with suppress(PerdureError):
            stream.reply()
    lose(store)
    with opened(model, store) as rt:
        assert rt.session("walk").resume().tokens == expected.tokens
        assert encoded(rt) == 1


def test_o1_e1_an_event_tells_of_each_file_that_is_encoded(model: Path, tmp_path: Path) -> None:
    first, second = Image(picture(seed=1)), Image(picture(seed=2))
    with opened(model, tmp_path) as rt, rt.events(["ImageEncoded"]) as events:
        for said in (seen(first, "?"), seen(first, "!"), seen(first, second, "?")):
            rt.chat([said], namespace="ada", **ASK)
        told = [event for event in events.poll() if isinstance(event, ImageEncoded)]
    assert first.data is not None
    assert second.data is not None
    assert [(event.tokens, event.nbytes, event.namespace) for event in told] == [
        (64, len(first.data), "ada"),
        (64, len(second.data), "ada"),
    ]
    assert all(event.seconds > 0 for event in told)


def test_a5_i6_an_image_that_changed_is_named_and_its_mark_is_not_shown(model: Path, tmp_path: Path) -> None:
    """What stands for an image inside would let a client type one."""
    first, second = Image(picture(seed=1)), Image(picture(seed=2))
    with opened(model, tmp_path) as rt:
        reply = rt.chat([seen("see ", first, BEHIND)], **ASK)
        more: list[Any] = [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "so?"}]
        other = rt.chat([seen("see ", second, BEHIND), *more], **ASK)
    difference = other.difference
    assert difference is not None
    assert difference.place == "messages[0] (user), line 1"
    assert difference.now.startswith(f"see [image {second.digest[:12]}] here w1")
    assert difference.before.startswith(f"see [image {first.digest[:12]}] here w1")


def test_e1_e2_e3_an_image_of_low_detail_takes_fewer_tokens_wherever_it_stands(
    toy: Toy, tmp_path: Path
) -> None:
    """The same file in both details is two images, in one prompt, after a restart and in a fork; each is
    encoded once."""
    model, store, file = toy("qwen2vl")[0], tmp_path / "store", picture(800, 64)
    whole, low = Image(file), Image(file, detail="low")
    assert whole == Image(file, detail="high") != low
    said = seen("a ", low, " b ", whole, BEHIND)
    with opened(model, tmp_path / "cold") as rt:
        session = rt.session("walk")
        expected = [session.say(each, **ASK) for each in (said, seen("and ", low))]
        alone = [rt.chat([seen(each, BEHIND)], **ASK).usage.media_tokens for each in (low, whole)]
        assert alone[0] < alone[1]
        assert expected[0].usage.media_tokens == sum(alone)
        assert rt.count_chat([seen(whole)]) - rt.count_chat([seen(low)]) == alone[1] - alone[0]
    with opened(model, store) as rt:
        assert rt.session("walk").say(said, **ASK).tokens == expected[0].tokens
    with opened(model, store) as rt:
        session = rt.session("walk")
        [kept] = session.history()[0].messages
        assert [image for _, image in kept.images] == [low, whole]
        for each in (session.fork("branch"), session):
            reply = each.say(seen("and ", low), **ASK)
            assert reply.tokens == expected[1].tokens
            assert reply.reuse.reused >= sum(alone)
        assert encoded(rt) == 2
        assert Message.parse(kept.to_dict()) == kept
    with pytest.raises(InvalidInputError, match="auto, low, high"):
        Image(file, detail="tiny")  # type: ignore[arg-type]


def test_a5_a_detail_that_changed_is_named(toy: Toy, tmp_path: Path) -> None:
    file = picture(800, 64)
    with opened(toy("qwen2vl")[0], tmp_path) as rt:
        reply = rt.chat([seen("see ", Image(file), BEHIND)], **ASK)
        more: list[Any] = [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "so?"}]
        other = rt.chat([seen("see ", Image(file, detail="low"), BEHIND), *more], **ASK)
    assert other.difference is not None
    assert other.difference.now.startswith(f"see [image {Image(file).digest[:12]} low] here w1")
    assert other.difference.before.startswith(f"see [image {Image(file).digest[:12]}] here w1")


def test_e1_e2_a_sound_is_kept_and_heard_once(toy: Toy, tmp_path: Path) -> None:
    """It is 750 tokens in this kind of model, however long it is."""
    model, store = toy("qwen2a")[0], tmp_path / "store"
    first, second = Sound(sound(1)), Sound(sound(2))
    with opened(model, tmp_path / "cold") as rt:
        session = rt.session("walk")
        expected = [session.say(said, **ASK) for said in (seen("what is ", first, BEHIND), "and now?")]
    with opened(model, store) as rt:
        reply = rt.session("walk").say(seen("what is ", first, BEHIND), **ASK)
        assert reply.tokens == expected[0].tokens
        assert reply.usage.media_tokens == 750
        assert rt.count_chat([seen(second)]) > 750
        assert rt.chat([seen("what is ", second, BEHIND)], **ASK).tokens != reply.tokens
    with opened(model, store) as rt:
        reply = rt.session("walk").say("and now?", **ASK)
        assert reply.tokens == expected[1].tokens
        assert reply.reuse.reused >= 750
        assert encoded(rt) == 2
        [said] = rt.session("walk").history()[0].messages
        assert said.images == ((8, first),)
        assert rt.chat_format.image_reader().file(first.digest, "") == first.data


def test_what_is_no_sound_is_refused_in_words(model: Path, toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="WAV file"):
        Sound(picture())
    with opened(model, tmp_path / "a") as rt, pytest.raises(InvalidInputError, match="takes no sounds"):
        rt.chat([seen(Sound(sound(1)), "?")], **ASK)
    with opened(toy("qwen2a")[0], tmp_path / "b") as rt:
        for wrong, words in ((Sound(sound(rate=8000)), "16000 samples"), (Image(picture()), "no images")):
            with pytest.raises(InvalidInputError, match=words):
                rt.chat([seen(wrong, "?")], **ASK)
