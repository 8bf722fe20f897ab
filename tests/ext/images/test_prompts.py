"""Media in prompts: read once, reused as text is, and never mistaken for another."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perdure
from engine.failures import failing_decode
from perdure import (
    CannotRewindError,
    CorruptStateError,
    DecodeCancelled,
    InvalidInputError,
    Model,
    Reply,
    RowError,
    Runtime,
    TokenError,
)
from perdure.ext.images.encoder import Encoder
from perdure.ext.images.library import find_library
from perdure.ext.images.media_store import FileDigest, MediaStore, stored_media
from perdure.spi.cache import spans

from .pictures import picture, sound
from .processes import differences

Toy = Callable[[str], tuple[Path, Path]]

KINDS = ("llava", "idefics3", "gemma3", "qwen2a", "qwen2vl", "qwen3vl", "qwen35")
CHANGES = {
    "gemma3": ("reversed", "flipped"),
    "qwen2vl": ("reversed", "swapped", "flat"),
    "qwen3vl": ("reversed", "swapped", "flat"),
    "qwen35": ("reversed", "swapped", "flat"),
}
"""What is changed of a medium, which has to be seen."""
CHUNK = 64


@dataclass(frozen=True)
class Scene:
    """A model, and prompts with media that were encoded into a store."""

    model: Path
    media: Path
    """A store that has rows and nothing else."""
    first: list[int]
    """What stands for one file."""
    second: list[int]

    def store(self, folder: Path) -> Path:
        """A new store with these rows."""
        shutil.copytree(self.media / "media", folder / "media")
        return folder

    def prompt(self, *media: Sequence[int], ask: int = 40) -> list[int]:
        """Text and media in turn, then some text."""
        prompt = [1, *range(300, 300 + 37)]
        for index, ids in enumerate(media):
            prompt += [*ids, *range(310 + index, 350)]
        return [*prompt, ask]


@pytest.fixture(scope="module", params=KINDS)
def scene(request: pytest.FixtureRequest, toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return scene_of(request.param, toy, tmp_path_factory.mktemp("media"))


def digest_of(data: bytes) -> FileDigest:
    return FileDigest(hashlib.sha256(data).digest())


def scene_of(kind: str, toy: Toy, folder: Path) -> Scene:
    model, projector = toy(kind)
    store = MediaStore(folder)
    files = [sound(1), sound(0.5)] if kind == "qwen2a" else [picture(seed=1), picture(seed=2)]
    with Encoder(model, projector, threads=1) as encoder:
        known = [
            store.keep("", encoder.identity, digest_of(data), encoder.encode(data, form))
            for data in files
            for form in ("audio" if kind == "qwen2a" else "image",)
        ]
    return Scene(model, folder, known[0].tokens, known[1].tokens)


def opened(scene: Scene, store: Path, *, exact: bool = True, **options: Any) -> Runtime:
    return perdure.open(scene.model, store=store, n_ctx=2048, slots=2, threads=1, exact=exact, **options)


def written(rt: Runtime, prompt: Sequence[int]) -> Reply:
    return rt.generate(prompt=prompt, max_tokens=12, temperature=0, logprobs=2)


def same(one: Reply, other: Reply) -> bool:
    assert one.logprobs is not None
    return one.tokens == other.tokens and one.logprobs == other.logprobs


def test_e2_a_medium_is_read_as_libmtmd_reads_it(toy: Toy, tmp_path: Path) -> None:
    """Logits equal libmtmd's own helper to the last bit, in one process on one library; what is changed is
    seen."""
    library = tmp_path / "library"
    library.mkdir()
    source = find_library(None)
    (library / source.name).symlink_to(source)
    image, wave = tmp_path / "image", tmp_path / "sound"
    image.write_bytes(picture())
    wave.write_bytes(sound())
    for kind in KINDS:
        form = "audio" if kind == "qwen2a" else "image"
        file = wave if form == "audio" else image
        changes = ["", *CHANGES.get(kind, ())]
        found = [differences(library, *toy(kind), file, form, change) for change in changes]
        assert found[0] == 0.0, kind
        assert all(each > 0.1 for each in found[1:]), (kind, found)


def test_e2_warm_equals_cold_here_and_in_a_fresh_process_state(scene: Scene, tmp_path: Path) -> None:
    """The same bits: computed, reused from a slot, from the disk, and behind another medium."""
    prompts = [
        scene.prompt(scene.first),
        scene.prompt(scene.first, ask=41),
        scene.prompt(scene.first, scene.second),
        scene.prompt(scene.first, scene.first),
        scene.prompt(scene.second),
    ]
    cold = []
    for index, prompt in enumerate(prompts):
        with opened(scene, scene.store(tmp_path / f"cold{index}")) as rt:
            cold.append(written(rt, prompt))
            assert cold[-1].reuse.computed == len(prompt)
    assert len({reply.tokens for reply in cold}) == len(cold)
    store = scene.store(tmp_path / "warm")
    # Of the text alone, where a window cannot go back.
    for again in range(2):
        with opened(scene, store) as rt:
            for prompt, known in zip(prompts, cold, strict=True):
                reply = written(rt, prompt)
                assert same(reply, known)
            if again:
                assert reply.reuse.reused > 0


def test_e1_state_is_reused_without_rows(scene: Scene, tmp_path: Path) -> None:
    """A fresh runtime goes on from kept K/V though all rows are gone: no image token is computed."""
    prompt = scene.prompt(scene.first)
    store = scene.store(tmp_path / "store")
    with opened(scene, store) as rt:
        first = written(rt, prompt)
        rt.generate(prompt=[*prompt, *range(300, 420)], max_tokens=1)
    MediaStore(store).forget_rows()
    with opened(scene, store) as rt:
        reply = written(rt, [*prompt, *range(300, 420)])
        media = sum(token < 0 for token in prompt)
        assert reply.reuse.computed < len(prompt) + 120 - media
        assert reply.finish_reason == "length"
        with pytest.raises(CorruptStateError, match="encoded again"):
            written(rt, scene.prompt(scene.second))
        assert written(rt, [1, 300, 301]).tokens
    assert first.tokens


def test_forks_cuts_and_states_hold_with_media(scene: Scene) -> None:
    with Model(scene.model) as model, model.context(n_ctx=2048, n_seq=3, threads=1) as ctx:
        ctx.media = stored_media(scene.media, None)
        prompt = scene.prompt(scene.first)
        at = next(index for index, token in enumerate(prompt) if token < 0)
        end = max(index for index, token in enumerate(prompt) if token < 0) + 1
        ctx.decode(prompt[:end], rows="none")
        kept = ctx.checkpoint()
        ctx.decode(prompt[end:])
        row = np.array(ctx.logits())
        ctx.fork(0, 1)
        ctx.load(ctx.save(0), 2)
        for seq in (0, 1, 2):
            assert ctx.tokens(seq) == prompt
            ctx.decode([7], seq)
            assert np.array_equal(np.array(ctx.logits()), follow(ctx, seq))
        ctx.restore(kept)
        ctx.decode(prompt[end:])
        assert np.array_equal(np.array(ctx.logits()), row)
        ctx.clear(1)
        ctx.decode(prompt[:at], 1)
        for start in range(at, end):
            # One medium after the other, and text between them, each in a step.
            if start == at or (prompt[start] < 0) != (prompt[start - 1] < 0):
                stop = next((i for i in range(start, end) if (prompt[i] < 0) != (prompt[start] < 0)), end)
                ctx.decode(prompt[start:stop], 1, rows="none")
        ctx.decode(prompt[end:], 1)
        assert np.array_equal(np.array(ctx.logits()), row)


def test_k4_images_of_two_dimensions_are_cut_as_a_whole(toy: Toy, tmp_path: Path) -> None:
    """Their rows are taken apart and put together at any token; a cut inside of one names its beginning."""
    scene = scene_of("qwen2vl", toy, tmp_path / "media")
    with Model(scene.model) as model, model.context(n_ctx=2048, n_seq=2, n_batch=32, threads=1) as ctx:
        ctx.media = stored_media(scene.media, None)
        prompt = scene.prompt(scene.first, scene.second)
        [(start, end), *_] = spans(np.array(prompt, np.int32))
        ctx.decode(prompt)
        row = np.array(ctx.logits())
        capture = ctx.capture()
        assert capture.rows is not None
        pieces = [capture.rows.cut(at, min(at + 16, len(prompt))) for at in range(0, len(prompt), 16)]
        ctx.assemble(prompt[:-1], [np.concatenate(pieces)[:-1]], None, 1)
        ctx.decode(prompt[-1:], 1)
        assert np.abs(np.array(ctx.logits()) - row).max() < 1e-3
        for inside in (start + 1, end - 1):
            with pytest.raises(CannotRewindError, match=f"cut at {start}") as refused:
                ctx.truncate(inside)
            assert refused.value.reachable == start
            assert ctx.tokens() == prompt
            # Where rows of it are left out, the image is read again as a whole.
            ctx.assemble(prompt[:inside], [np.concatenate(pieces)[:inside]], None, 1)
            ctx.truncate(start, 1)
            ctx.decode(prompt[start:], 1)
            assert np.abs(np.array(ctx.logits()) - row).max() < 1e-3
        for length in (end, start):
            ctx.truncate(length)
            ctx.decode(prompt[length:])
            assert np.array_equal(np.array(ctx.logits()), row)
        for step, after in ((1, 0), (2, 9), (4, 30), (5, 3), (6, 12)):
            ctx.truncate(end)
            with failing_decode(ctx, step=step, after=after), pytest.raises(DecodeCancelled):
                ctx.decode(prompt[end:])
            assert ctx.length() in (0, end)
            ctx.decode(prompt[ctx.length() :])
            assert np.array_equal(np.array(ctx.logits()), row)


def test_e3_an_image_of_another_kind_of_model_is_refused(toy: Toy, tmp_path: Path) -> None:
    """Its width, and where that is the same, its positions."""
    for theirs, ours, words in (
        ("qwen3vl", "qwen2vl", "192 numbers"),
        ("qwen2vl", "llava", "two dimensions"),
    ):
        scene = scene_of(theirs, toy, tmp_path / theirs)
        with Model(toy(ours)[0]) as model, model.context(n_ctx=512, threads=1) as ctx:
            ctx.media = stored_media(scene.media, None)
            with pytest.raises(InvalidInputError, match=words):
                ctx.decode(scene.prompt(scene.first))
            assert ctx.length() == 0


@pytest.mark.parametrize("kind", ["llava", "gemma3", "qwen2vl", "qwen35"])
def test_e1_image_tokens_are_computed_once(kind: str, toy: Toy, tmp_path: Path) -> None:
    """Behind an image that was read, whatever is asked: here, in a fresh process's stead, and in a fork."""
    scene = scene_of(kind, toy, tmp_path / "media")
    store = scene.store(tmp_path / "store")
    prompt = scene.prompt(scene.first, scene.second)
    behind = spans(np.array(prompt, np.int32))[-1][1]
    for again in range(2):
        with opened(scene, store, exact=False) as rt:
            for ask in range(41, 44):
                reply = written(rt, [*prompt[:behind], *range(310, 320), ask])
                first = not again and ask == 41
                assert reply.reuse.reused >= (0 if first else behind), (again, ask, reply.reuse)


@pytest.mark.parametrize("kind", ["llava", "gemma3", "qwen2vl", "qwen35"])
def test_v1_guesses_behind_an_image_change_no_token(kind: str, toy: Toy, tmp_path: Path) -> None:
    """N-grams of the session guess text there, never an image, also where one came behind the same words."""
    scene = scene_of(kind, toy, tmp_path / "media")
    prompt = [1, 300, 301, 302, *scene.first, *range(310, 330), 300, 301, 302]
    asked: Any = {"max_tokens": 24, "temperature": 0, "logit_bias": dict.fromkeys((300, 301, 302), 50.0)}
    with opened(scene, scene.store(tmp_path / "store"), exact=False) as rt:
        plain = rt.generate(prompt=prompt, speculate=0, **asked)
        guessed = rt.generate(prompt=prompt, speculate=6, **asked)
        assert plain.timings.drafted_tokens == 0
        assert guessed.timings.drafted_tokens >= guessed.timings.accepted_tokens > 0
        assert guessed.tokens == plain.tokens
        # What it left in the slot is what it says.
        more = rt.generate(prompt=[*prompt, *guessed.tokens, 40], speculate=6, **asked)
        rt.cache.clear()
        assert rt.generate(prompt=[*prompt, *guessed.tokens, 40], speculate=0, **asked).tokens == more.tokens


def test_k2_a_slot_goes_back_to_where_an_image_begins(toy: Toy, tmp_path: Path) -> None:
    """In exact mode a whole step can end inside of one: what is before it is used again."""
    scene = scene_of("qwen2vl", toy, tmp_path / "media")
    prompt = scene.prompt(scene.first, scene.second)
    media = spans(np.array(prompt, np.int32))
    start, end = media[-1]
    asked = [*prompt[:end], 5, 6, 7]
    assert start < (end + 1) // CHUNK * CHUNK < end
    with opened(scene, scene.store(tmp_path / "store")) as rt:
        written(rt, [*asked, 8])
        assert written(rt, [*asked[:-1], 9, 10]).reuse.reused == start


def follow(ctx: perdure.Context, seq: int) -> Any:
    """The logits of `seq`'s last token, computed again behind a state of all before it."""
    tokens = ctx.tokens(seq)
    ctx.clear(seq)
    ctx.decode(tokens[:-1], seq)
    ctx.decode(tokens[-1:], seq)
    return np.array(ctx.logits())


def test_media_of_several_requests_go_through_together(scene: Scene, tmp_path: Path) -> None:
    """Steps with media stand alone; others go on between them."""
    prompts = [scene.prompt(scene.first), [1, *range(300, 420)], scene.prompt(scene.second), [1, 300]]
    with opened(scene, scene.store(tmp_path / "one"), exact=True) as rt:
        alone = [written(rt, prompt) for prompt in prompts]
    with opened(scene, scene.store(tmp_path / "all"), exact=True) as rt:
        streams = [rt.submit(prompt, max_tokens=12, temperature=0, logprobs=2) for prompt in prompts]
        together = [stream.reply() for stream in streams]
    assert all(same(one, other) for one, other in zip(alone, together, strict=True))
    with opened(scene, scene.store(tmp_path / "batch"), exact=False) as rt:
        streams = [rt.submit(prompt, max_tokens=12, temperature=0) for prompt in prompts]
        assert [stream.reply().tokens for stream in streams] == [reply.tokens for reply in alone]


def test_what_cannot_be_read_is_refused_in_words(toy: Toy, tmp_path: Path) -> None:
    scene = scene_of("llava", toy, tmp_path / "media")
    prompt = scene.prompt(scene.first)
    with opened(scene, scene.store(tmp_path / "store")) as rt:
        for wrong in (
            prompt[: 38 + 20],
            [*prompt[:38], *prompt[39:]],
            [*prompt[: 38 + 20], 5, 6],
            [*prompt[:40], 5, *prompt[40:]],
        ):
            with pytest.raises(InvalidInputError, match="image"):
                written(rt, wrong)
        with pytest.raises(InvalidInputError, match="prompt_logprobs"):
            rt.generate(prompt=prompt, max_tokens=1, prompt_logprobs=1)
        with pytest.raises(CorruptStateError):
            written(rt, [*prompt[:38], *(each ^ 1 for each in scene.first), 5])
        assert written(rt, prompt).tokens
    with perdure.open(scene.model, n_ctx=512, threads=1) as rt, pytest.raises(TokenError):
        written(rt, prompt)
    with Model(scene.model) as model, model.context(n_ctx=512, threads=1) as ctx:
        with pytest.raises(TokenError):
            ctx.decode(prompt)
        ctx.media = stored_media(scene.media, None)
        with pytest.raises(RowError, match="image"):
            ctx.decode(prompt, rows="all")
        assert ctx.length() == 0
        ctx.decode(prompt)


def test_too_small_steps_are_refused(toy: Toy, tmp_path: Path) -> None:
    cases: Any = (("gemma3", {"n_batch": 8}, "n_batch=16"),)
    for kind, options, words in cases:
        scene = scene_of(kind, toy, tmp_path / kind)
        with opened(scene, scene.store(tmp_path / f"{kind}-store"), **options) as rt:
            with pytest.raises(InvalidInputError, match=words):
                written(rt, scene.prompt(scene.first))
            assert written(rt, [1, 300]).tokens
