"""Bad inputs, tried in a child process: `python -m promises.bad_inputs GROUP ZOO SCRATCH`.

Each case is named before it is tried, so that whatever ends the process can be told. A case is bad if it does
not raise a `PerdureError` (or the `TypeError` that Python itself raises), or if it changes the context.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

import gguf_bytes
import zoo
from perdure import Checkpoint, Context, Feed, Model, PerdureError
from perdure.engine.state import VERSION
from promises.kinds import prompt
from zoo.attention import WIDTH, ends, feed_forward, sizes
from zoo.sheet import Sheet

PROBE = [3, 5, 8]
HELD: tuple[list[int], ...] = (prompt(20), prompt(10, salt=1), [])
_HEAD = struct.Struct("<8sIIQQ16s32s")


class Scene:
    """A model and a context that holds something, as every case finds them."""

    ctx: Context
    state: bytes
    checkpoint: Checkpoint
    lora: Any

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.folder = folder
        self.scratch = scratch
        self.model = Model(folder / "llama.gguf")
        self.reopen()
        self.state = self.ctx.save()
        self.checkpoint = self.ctx.checkpoint()
        self.lora = self.model.adapter(folder / "llama-lora.gguf")
        self.ctx.decode(PROBE)
        self.expected = self.ctx.logits().copy()
        self.ctx.truncate(20)

    def reopen(self) -> None:
        self.ctx = self.open()
        for seq, tokens in enumerate(HELD):
            if tokens:
                self.ctx.decode(tokens, seq)

    def open(self, model: Model | None = None, **settings: Any) -> Context:
        return (model or self.model).context(
            **({"n_ctx": 64, "n_seq": 3, "n_batch": 16, "threads": 1} | settings)
        )

    def other(self, name: str = "qwen3") -> Model:
        return Model(self.folder / f"{name}.gguf")

    def complaint(self) -> str | None:
        """What is wrong with the context now, if anything."""
        held = tuple(self.ctx.tokens(seq) for seq in range(3))
        if held != HELD:
            return f"the context now holds {[len(tokens) for tokens in held]} tokens"
        self.ctx.decode(PROBE)
        right = np.array_equal(self.ctx.logits(), self.expected)
        self.ctx.truncate(20)
        return None if right else "the context answers otherwise now"

    def file(self, data: bytes, name: str = "bad.gguf") -> Path:
        path = self.scratch / name
        path.write_bytes(data)
        return path

    def whole(self) -> bytes:
        return (self.folder / "llama.gguf").read_bytes()

    def patched(self, key: str, value: bytes) -> Path:
        """The model's file with another value of 4 bytes in its metadata."""
        data = bytearray(self.whole())
        at = data.index(key.encode()) + len(key) + 4
        data[at : at + 4] = value
        return self.file(bytes(data))

    def foreign(self, model: Model | None = None, **settings: Any) -> bytes:
        """Saved state of another context."""
        with self.open(model, **settings) as ctx:
            ctx.decode(prompt(20))
            return ctx.save()

    def forged(self, **fields: Any) -> bytes:
        """Saved state with other fields in its header, and a checksum that fits them."""
        names = ("magic", "version", "words", "tokens", "payload", "checksum", "digest")
        values = dict(zip(names, _HEAD.unpack_from(self.state), strict=True)) | fields
        return signed(_HEAD.pack(*values.values()) + self.state[_HEAD.size :])

    def reworded(self, change: Callable[[list[int]], list[int]], cut: int = 0) -> bytes:
        """Saved state with other tokens and `cut` bytes less payload, and a checksum that fits."""
        magic, version, words, count, payload, _, digest = _HEAD.unpack_from(self.state)
        at = _HEAD.size + words
        tokens = change(list(struct.unpack_from(f"<{count}i", self.state, at)))
        head = _HEAD.pack(magic, version, words, len(tokens), payload - cut, bytes(16), digest)
        body = self.state[at + 4 * count : len(self.state) - cut]
        return signed(head + self.state[_HEAD.size : at] + struct.pack(f"<{len(tokens)}i", *tokens) + body)


def signed(data: bytes) -> bytes:
    digest = xxhash.xxh3_128(data[:32] + data[48:]).digest()
    return data[:32] + digest + data[48:]


def _closed_context(scene: Scene) -> Context:
    ctx = scene.open()
    ctx.decode(prompt(5))
    ctx.close()
    return ctx


def _closed_model(scene: Scene) -> Model:
    model = scene.other("llama")
    model.close()
    return model


def _stale(scene: Scene) -> Any:
    with scene.open() as ctx:
        ctx.decode(prompt(5))
        return ctx.logits()


def _narrow(scene: Scene) -> Model:
    """A model with heads of 16 values, half a block of q8_0."""

    def fill(sheet: Sheet, vocabulary: int) -> None:
        sizes(sheet, 1, key=16, value=16, rotated=16)
        ends(sheet, vocabulary)
        sheet.vector("blk.0.attn_norm.weight", WIDTH)
        for part, rows in (("attn_q", 64), ("attn_k", 32), ("attn_v", 32)):
            sheet.matrix(f"blk.0.{part}.weight", rows, WIDTH)
        sheet.matrix("blk.0.attn_output.weight", WIDTH, 64)
        feed_forward(sheet, "blk.0")

    recipe = zoo.Recipe(name="narrow", architecture="llama", memory="full", fill=fill)
    return Model(recipe.write(scene.scratch))


Case = Callable[[Scene], object]

TOKENS: dict[str, Any] = {
    "below 0": [-1],
    "far below 0": [-(2**63)],
    "one past the vocabulary": [384],
    "2**31": [2**31],
    "2**32": [2**32],
    "2**63": [2**63],
    "2**64": [2**64],
    "-1 and 2**63": [-1, 2**63],
    "good ones and one bad": [1, 2, 3, 999],
    "booleans": [True, False],
    "floats": [1.0, 2.0],
    "a fraction": [1.5],
    "not a number": [math.nan],
    "complex": [1j],
    "None in a list": [None],
    "None": None,
    "a number": 5,
    "text": "abc",
    "texts": ["a", "b"],
    "bytes": b"ab",
    "nested": [[1, 2], [3, 4]],
    "ragged": [[1], [2, 3]],
    "two dimensions": np.ones((2, 2), np.int32),
    "no dimension": np.array(5),
    "an empty list": [],
    "an empty tuple": (),
    "an empty array": np.array([], np.int32),
    "a set": {1, 2},
    "a mapping": {1: 2},
    "a generator": (token for token in (1, 2)),
    "an object": object(),
    "objects": [object()],
    "dates": np.array(["2020-01-01"], "datetime64[D]"),
    "one more than fits": prompt(45),
    "more than fits": prompt(500),
    "a range of 10**12": range(10**12),
    "2**40 of them": np.broadcast_to(np.int32(1), (2**40,)),
}

SEQUENCES: dict[str, Case] = {
    **{
        f"decode into {seq!r}": lambda s, seq=seq: s.ctx.decode([1], seq)  # type: ignore[misc]
        for seq in (-1, 3, 256, 2**31, 2**63, True, 1.0, "0", None, [0], np.float32(1))
    },
    "tokens of 3": lambda s: s.ctx.tokens(3),
    "length of -1": lambda s: s.ctx.length(-1),
    "shortest cut of 3": lambda s: s.ctx.shortest_cut(3),
    "truncate 3": lambda s: s.ctx.truncate(0, 3),
    "fork from 3": lambda s: s.ctx.fork(3, 0),
    "fork into 3": lambda s: s.ctx.fork(0, 3),
    "fork into -1": lambda s: s.ctx.fork(0, -1),
    "fork into itself": lambda s: s.ctx.fork(0, 0),
    "fork of an empty one into itself": lambda s: s.ctx.fork(2, 2),
    "clear 3": lambda s: s.ctx.clear(3),
    "clear text": lambda s: s.ctx.clear("all"),  # type: ignore[arg-type]
    "save 3": lambda s: s.ctx.save(3),
    "save an empty one": lambda s: s.ctx.save(2),
    "load into 3": lambda s: s.ctx.load(s.state, 3),
    "load into -1": lambda s: s.ctx.load(s.state, -1),
    "checkpoint of 3": lambda s: s.ctx.checkpoint(3),
    "checkpoint of an empty one": lambda s: s.ctx.checkpoint(2),
    "restore into 3": lambda s: s.ctx.restore(s.checkpoint, 3),
    "logits of 3": lambda s: s.ctx.logits(seq=3),
    "logits of text": lambda s: s.ctx.logits(seq="0"),  # type: ignore[arg-type]
}

STEPS: dict[str, Any] = {
    "no feeds": [],
    "None": None,
    "numbers": [1, 2],
    "a sequence twice": [Feed(0, [1]), Feed(0, [2])],
    "no tokens": [Feed(0, [])],
    "no tokens beside some": [Feed(0, [1]), Feed(1, [])],
    "sequence 9": [Feed(0, [1]), Feed(9, [1])],
    "sequence -1": [Feed(-1, [1])],
    "sequence None": [Feed(None, [1])],  # type: ignore[arg-type]
    "a sequence that cannot be hashed": [Feed([0], [1])],  # type: ignore[arg-type]
    "a token below 0": [Feed(0, [1]), Feed(1, [-1])],
    "a token past the vocabulary": [Feed(0, [384])],
    "more than a batch": [Feed(0, prompt(9)), Feed(1, prompt(9))],
    "more than fits": [Feed(0, prompt(500))],
    "a row that is not there": [Feed(0, [1], rows=[1])],
    "rows of another kind": [Feed(0, [1], rows="some")],  # type: ignore[arg-type]
}

ROWS: dict[str, Case] = {
    **{
        f"rows {rows!r}": lambda s, rows=rows: s.ctx.decode([1, 2], rows=rows)  # type: ignore[misc]
        for rows in ([2], [-3], [2**40], ["a"], [1.0], [True], [None], [[0]], "first", "", 3, 0.5, None)
    },
    **{
        f"row {row!r}": lambda s, row=row: s.ctx.logits(row)  # type: ignore[misc]
        for row in (0, -1, 99, -99, 2**70, "x", None)
    },
    "a row of a step without rows": lambda s: _no_row(s),
    "fewer values than the vocabulary": lambda s: _with_row(s).overwrite(np.zeros(3, np.float32)),
    "one value for all": lambda s: _with_row(s).overwrite(np.zeros(1, np.float32)),
    "rows of values": lambda s: _with_row(s).overwrite(np.zeros((2, 384), np.float32)),
    "no values": lambda s: _with_row(s).overwrite(None),  # type: ignore[arg-type]
    "a mask that rules out all": lambda s: _with_row(s).rule_out(np.zeros(48, np.uint8)),
    "a mask of floats": lambda s: _with_row(s).rule_out(np.ones(48)),  # type: ignore[arg-type]
    "no mask": lambda s: _with_row(s).rule_out(None),  # type: ignore[arg-type]
    "a row past the last": lambda s: _with_row(s).logits(3),
    "a row that was not asked for": lambda s: _with_row(s).logits(0),
    "a row of another sequence": lambda s: _with_row(s).logits(seq=1),
}


def _no_row(scene: Scene) -> None:
    with scene.open() as ctx:
        ctx.decode([1, 2], rows="none")
        ctx.logits()


def _with_row(scene: Scene) -> Context:
    ctx = scene.open()
    ctx.decode([1, 2, 3])
    return ctx


CUTS: dict[str, Any] = {
    "below 0": -1,
    "one too long": 21,
    "2**31": 2**31,
    "2**63": 2**63,
    "a fraction": 1.5,
    "a float": 3.0,
    "not a number": math.nan,
    "infinity": math.inf,
    "text": "3",
    "None": None,
    "True": True,
    "a list": [3],
}

OPENINGS: dict[str, dict[str, Any]] = {
    f"{name} {value!r}": {name: value}
    for name, values in {
        "n_ctx": (0, -1, 2**31 - 257, 2**31, 2**40, 1.5, "8", None, True),
        "n_seq": (0, -1, 257, 2**31, 2**40, 1.5, "8", None, True),
        "n_batch": (0, -1, 2**16 + 1, 2**31, 2**40, 1.5, None),
        "threads": (0, -1, 513, 2**31, 2**40, "2", 1.5),
        "k_type": ("unknown", "", "Q8_0", "q8_K", 8, None, ["f16"]),
        "v_type": ("unknown", "q6_K", 8, None),
        "rope_freq_base": (-1.0, math.nan, math.inf, 1e300, "x", None),
        "rope_freq_scale": (-1.0, math.nan, math.inf, 1e300),
        "n_contexts": (1,),
    }.items()
    for value in values
} | {
    "a quantised v without flash": {"v_type": "q8_0", "flash": False},
    "a q4_0 v without flash": {"v_type": "q4_0", "flash": False},
    "more cells than can be counted": {"n_ctx": 2**24, "n_seq": 256},
    "more memory than there is": {"n_ctx": 2**30},
}

STATES: dict[str, Case] = {
    "no bytes": lambda s: s.ctx.load(b""),
    "None": lambda s: s.ctx.load(None),  # type: ignore[arg-type]
    "a number": lambda s: s.ctx.load(5),  # type: ignore[arg-type]
    "text": lambda s: s.ctx.load("state"),  # type: ignore[arg-type]
    "garbage": lambda s: s.ctx.load(random.Random(1).randbytes(5000)),
    "the mark alone": lambda s: s.ctx.load(s.state[:8]),
    "the mark and garbage": lambda s: s.ctx.load(s.state[:8] + random.Random(2).randbytes(5000)),
    "zeros": lambda s: s.ctx.load(bytes(len(s.state))),
    "every second byte": lambda s: s.ctx.load(memoryview(s.state)[::2]),
    "one byte less": lambda s: s.ctx.load(s.state[:-1]),
    "one byte more": lambda s: s.ctx.load(s.state + b"\0"),
    "the header alone": lambda s: s.ctx.load(s.state[: _HEAD.size]),
    "half": lambda s: s.ctx.load(s.state[: len(s.state) // 2]),
    "another model's": lambda s: s.ctx.load(s.foreign(s.other())),
    "a recurrent model's": lambda s: s.ctx.load(s.foreign(s.other("mamba"))),
    "another number of streams": lambda s: s.ctx.load(s.foreign(n_seq=2)),
    "one pool": lambda s: s.ctx.load(s.foreign(shared=True)),
    "other types": lambda s: s.ctx.load(s.foreign(k_type="q8_0", v_type="q8_0")),
    "another attention": lambda s: s.ctx.load(s.foreign(flash=False)),
    "another rope": lambda s: s.ctx.load(s.foreign(rope_freq_base=5e5)),
    "a context with an adapter": lambda s: s.ctx.load(_adapted_state(s)),
    "a later format": lambda s: s.ctx.load(s.forged(version=VERSION + 1)),
    "another identity": lambda s: s.ctx.load(s.forged(digest=bytes(32))),
    "an identity that is none": lambda s: s.ctx.load(s.forged(digest=bytes(32), words=0, tokens=2**62)),
    "2**63 tokens": lambda s: s.ctx.load(s.forged(tokens=2**63)),
    "2**64 bytes of payload": lambda s: s.ctx.load(s.forged(payload=2**64 - 1)),
    "tokens past the vocabulary": lambda s: s.ctx.load(s.reworded(lambda t: [*t[:-1], 384])),
    "tokens below 0": lambda s: s.ctx.load(s.reworded(lambda t: [-1, *t[1:]])),
    "no tokens": lambda s: s.ctx.load(s.reworded(lambda t: [])),
    "more tokens than fit": lambda s: s.ctx.load(s.reworded(lambda t: t * 9)),
}


def _adapted_state(scene: Scene) -> bytes:
    with scene.open() as ctx:
        ctx.adapt({scene.lora: 1.0})
        ctx.decode(prompt(20))
        return ctx.save()


CHECKPOINTS: dict[str, Case] = {
    "None": lambda s: s.ctx.restore(None),  # type: ignore[arg-type]
    "bytes": lambda s: s.ctx.restore(s.state),  # type: ignore[arg-type]
    "another model's": lambda s: s.ctx.restore(_foreign_checkpoint(s, s.other())),
    "other types": lambda s: s.ctx.restore(_foreign_checkpoint(s, k_type="q8_0")),
    "no identity": lambda s: s.ctx.restore(Checkpoint(b"", s.checkpoint.tokens, None)),
    "other tokens": lambda s: s.ctx.restore(s.checkpoint, 1),
    "an empty sequence": lambda s: s.ctx.restore(s.checkpoint, 2),
    "no tokens": lambda s: s.ctx.restore(Checkpoint(s.checkpoint.identity, np.array([], np.int32), None)),
    "a longer sequence": lambda s: s.ctx.restore(_foreign_checkpoint(s, count=25)),
}


def _foreign_checkpoint(
    scene: Scene, model: Model | None = None, count: int = 20, **settings: Any
) -> Checkpoint:
    with scene.open(model, **settings) as ctx:
        ctx.decode(prompt(count))
        return ctx.checkpoint()


ADAPTERS: dict[str, Case] = {
    "None": lambda s: s.ctx.adapt(None),  # type: ignore[arg-type]
    "a list": lambda s: s.ctx.adapt([s.lora]),  # type: ignore[arg-type]
    "an object": lambda s: s.ctx.adapt({object(): 1.0}),  # type: ignore[dict-item]
    "text": lambda s: s.ctx.adapt({"lora": 1.0}),  # type: ignore[dict-item]
    "an adapter of another model": lambda s: s.ctx.adapt({_twin(s): 1.0}),
    "one good and one of another model": lambda s: s.ctx.adapt({s.lora: 1.0, _twin(s): 1.0}),
    **{
        f"scale {scale!r}": lambda s, scale=scale: s.ctx.adapt({s.lora: scale})  # type: ignore[misc]
        for scale in (math.nan, math.inf, -math.inf, 1e39, "1", None, [1.0], 1j)
    },
    "a missing file": lambda s: s.model.adapter(s.scratch / "missing.gguf"),
    "a directory": lambda s: s.model.adapter(s.scratch),
    "an empty file": lambda s: s.model.adapter(s.file(b"")),
    "garbage": lambda s: s.model.adapter(s.file(b"GGUF" + bytes(range(256)) * 9)),
    "half an adapter": lambda s: s.model.adapter(_half_adapter(s)),
    "the model itself": lambda s: s.model.adapter(s.folder / "llama.gguf"),
    "another model": lambda s: s.model.adapter(s.folder / "mamba.gguf"),
    "a model of another shape": lambda s: s.other("qwen3").adapter(s.folder / "llama-lora.gguf"),
    "no path": lambda s: s.model.adapter(5),  # type: ignore[arg-type]
}


def _twin(scene: Scene) -> Any:
    return scene.other("llama").adapter(scene.folder / "llama-lora.gguf")


def _half_adapter(scene: Scene) -> Path:
    data = (scene.folder / "llama-lora.gguf").read_bytes()
    return scene.file(data[: len(data) // 2])


FILES: dict[str, Case] = {
    "missing": lambda s: Model(s.scratch / "missing.gguf"),
    "a directory": lambda s: Model(s.scratch),
    "a device": lambda s: Model("/dev/null"),
    "a name with NUL": lambda s: Model("mo\0del.gguf"),
    "a number": lambda s: Model(5),  # type: ignore[arg-type]
    "no name that is known": lambda s: Model("no-such-model"),
    "empty": lambda s: Model(s.file(b"")),
    "three bytes": lambda s: Model(s.file(b"GGU")),
    "the mark alone": lambda s: Model(s.file(b"GGUF")),
    "text": lambda s: Model(s.file(b"not a model\n" * 100)),
    "zeros": lambda s: Model(s.file(bytes(10_000))),
    "the mark and random bytes": lambda s: Model(s.file(b"GGUF" + random.Random(3).randbytes(10_000))),
    "a header and random bytes": lambda s: Model(s.file(s.whole()[:24] + random.Random(4).randbytes(10_000))),
    "2**63 tensors": lambda s: Model(s.file(gguf_bytes.file(n_tensors=2**63))),
    "2**63 values": lambda s: Model(s.file(gguf_bytes.file(n_pairs=2**63))),
    "2**32 tensors": lambda s: Model(s.file(gguf_bytes.file(n_tensors=2**32))),
    "no tensors": lambda s: Model(
        s.file(gguf_bytes.file([gguf_bytes.text("general.architecture", "llama")]))
    ),
    "nothing in it": lambda s: Model(s.file(gguf_bytes.file())),
    "version 99": lambda s: Model(s.file(gguf_bytes.file(version=struct.pack("<I", 99)))),
    "an unknown architecture": lambda s: Model(
        s.file(gguf_bytes.file([gguf_bytes.text("general.architecture", "unheard-of")]))
    ),
    "too few tensors": lambda s: Model(s.file(gguf_bytes.tiny())),
    "an adapter": lambda s: Model(s.folder / "llama-lora.gguf"),
    "no layers": lambda s: Model(s.patched("llama.block_count", struct.pack("<I", 0))),
    "1,000 layers": lambda s: Model(s.patched("llama.block_count", struct.pack("<I", 1000))),
    "2**32 - 1 layers": lambda s: Model(s.patched("llama.block_count", struct.pack("<I", 2**32 - 1))),
    "no width": lambda s: Model(s.patched("llama.embedding_length", struct.pack("<I", 0))),
    "no heads": lambda s: Model(s.patched("llama.attention.head_count", struct.pack("<I", 0))),
    "an epsilon that is no number": lambda s: Model(
        s.patched("llama.attention.layer_norm_rms_epsilon", struct.pack("<f", math.nan))
    ),
    "an epsilon below 0": lambda s: Model(
        s.patched("llama.attention.layer_norm_rms_epsilon", struct.pack("<f", -1.0))
    ),
    "an odd rope": lambda s: Model(s.patched("llama.rope.dimension_count", struct.pack("<I", 3))),
    "a token twice": lambda s: Model(_renamed(s, b"C", b"D")),
    "a token twice up to NUL": lambda s: Model(_renamed(s, b"ing", b"C\0x")),
    **{
        f"cut at {part}/13": lambda s, part=part: Model(s.file(s.whole()[: len(s.whole()) * part // 13]))  # type: ignore[misc]
        for part in range(1, 13)
    },
    **{
        f"cut at byte {at}": lambda s, at=at: Model(s.file(s.whole()[:at]))  # type: ignore[misc]
        for at in (5, 8, 16, 23, 24, 25, 100, 1000, 5000, 9000, 10_200)
    },
    "one byte less": lambda s: Model(s.file(s.whole()[:-1])),
    "heads of half a block, k of whole ones": lambda s: s.open(_narrow(s), k_type="q8_0"),
    "heads of half a block, v of whole ones": lambda s: s.open(_narrow(s), v_type="q4_0"),
}


def _renamed(scene: Scene, token: bytes, other: bytes) -> Path:
    """The model's file with one token of the vocabulary written as another."""
    size = struct.pack("<Q", len(token))
    return scene.file(scene.whole().replace(size + token, size + other, 1))


_IDS = (-1, 384, 2**31, 2**32, 2**63, -(2**63), 2**64, "a", None, 1.5, True, [1])

WORDS: dict[str, Case] = {
    "a lone surrogate": lambda s: s.model.tokenize("a\ud800b"),
    "a lone low surrogate": lambda s: s.model.tokenize("\udfff"),
    "bytes": lambda s: s.model.tokenize(b"text"),  # type: ignore[arg-type]
    "None": lambda s: s.model.tokenize(None),  # type: ignore[arg-type]
    "a number": lambda s: s.model.tokenize(5),  # type: ignore[arg-type]
    "text over the limit": lambda s: s.model.tokenize("a" * (2**28 + 1)),
    **{f"piece of {token!r}": lambda s, token=token: s.model.piece(token) for token in _IDS},  # type: ignore[misc]
    **{f"end of {token!r}": lambda s, token=token: s.model.is_end(token) for token in _IDS},  # type: ignore[misc]
    **{f"text of {token!r}": lambda s, token=token: s.model.detokenize([1, token]) for token in _IDS},  # type: ignore[misc]
    "text of None": lambda s: s.model.detokenize(None),  # type: ignore[arg-type]
    "text of a number": lambda s: s.model.detokenize(5),  # type: ignore[arg-type]
    "text of text": lambda s: s.model.detokenize("abc"),  # type: ignore[arg-type]
}

CLOSED: dict[str, Case] = {
    "decode": lambda s: _closed_context(s).decode([1]),
    "step": lambda s: _closed_context(s).step([Feed(0, [1])]),
    "tokens": lambda s: _closed_context(s).tokens(),
    "length": lambda s: _closed_context(s).length(),
    "shortest cut": lambda s: _closed_context(s).shortest_cut(),
    "logits": lambda s: _closed_context(s).logits(),
    "truncate": lambda s: _closed_context(s).truncate(1),
    "fork": lambda s: _closed_context(s).fork(0, 1),
    "clear": lambda s: _closed_context(s).clear(),
    "clear one": lambda s: _closed_context(s).clear(0),
    "adapt": lambda s: _closed_context(s).adapt({}),
    "adapt with an adapter": lambda s: _closed_context(s).adapt({s.lora: 1.0}),
    "save": lambda s: _closed_context(s).save(),
    "load": lambda s: _closed_context(s).load(s.state),
    "checkpoint": lambda s: _closed_context(s).checkpoint(),
    "restore": lambda s: _closed_context(s).restore(s.checkpoint),
    "a view of a closed context": lambda s: _stale(s)[0],
    "a sum over a view of a closed context": lambda s: np.sum(_stale(s)),
    "tokens that are a view of a closed context": lambda s: s.ctx.decode(_stale(s)),
    "the model's tokenize": lambda s: _closed_model(s).tokenize("a"),
    "the model's detokenize": lambda s: _closed_model(s).detokenize([1]),
    "the model's piece": lambda s: _closed_model(s).piece(1),
    "the model's is_end": lambda s: _closed_model(s).is_end(1),
    "the model's metadata": lambda s: _closed_model(s).metadata,
    "the model's context": lambda s: _closed_model(s).context(),
    "the model's adapter": lambda s: _closed_model(s).adapter(s.folder / "llama-lora.gguf"),
    "the model's bos": lambda s: _closed_model(s).bos,
}

# What the checker itself must notice.
PLANTED: dict[str, Case] = {
    "answers": lambda s: s.ctx.tokens(),
    "raises something else": lambda s: {}[0],  # type: ignore[index]
    "changes the context": lambda s: _spoil(s),
    "ends by a signal": lambda s: os.kill(os.getpid(), signal.SIGSEGV),
}


def _spoil(scene: Scene) -> None:
    scene.ctx.truncate(3)
    scene.ctx.decode([-1])


GROUPS: dict[str, dict[str, Case]] = {
    "tokens": {name: lambda s, t=tokens: s.ctx.decode(t) for name, tokens in TOKENS.items()},  # type: ignore[misc]
    "sequences": SEQUENCES,
    "steps": {name: lambda s, f=feeds: s.ctx.step(f) for name, feeds in STEPS.items()},  # type: ignore[misc]
    "rows": ROWS,
    "cuts": {name: lambda s, c=cut: s.ctx.truncate(c) for name, cut in CUTS.items()},  # type: ignore[misc]
    "openings": {name: lambda s, o=opening: s.open(**o) for name, opening in OPENINGS.items()},  # type: ignore[misc]
    "states": STATES,
    "checkpoints": CHECKPOINTS,
    "adapters": ADAPTERS,
    "files": FILES,
    "words": WORDS,
    "closed": CLOSED,
}


def flips(scene: Scene) -> Iterator[tuple[str, Case]]:
    """One bit at every place before the payload, and at 200 in it."""
    _, _, words, count, payload, _, _ = _HEAD.unpack_from(scene.state)
    start = _HEAD.size + words + 4 * count
    dice = random.Random(5)
    places = [*range(start), *sorted(dice.sample(range(start, start + payload), 200))]
    for at in places:
        data = bytearray(scene.state)
        data[at] ^= 1 << dice.randrange(8)
        yield f"byte {at}", lambda s, data=data: s.ctx.load(data)  # type: ignore[misc]


def forgeries(scene: Scene) -> Iterator[tuple[str, bytes]]:
    """States that are whole and signed, but that no engine wrote."""
    dice = random.Random(6)
    _, _, words, count, payload, _, _ = _HEAD.unpack_from(scene.state)
    start = _HEAD.size + words + 4 * count
    for cut in (1, 7, 8, payload // 2, payload - 4, payload):
        yield f"{cut} bytes less", scene.reworded(lambda tokens: tokens, cut=cut)
    yield "a token less than positions", scene.reworded(lambda tokens: tokens[:-1])
    yield "a token more than positions", scene.reworded(lambda tokens: [*tokens, 1])
    # The payload opens with counts, positions, types and sizes.
    for at in [*range(start, start + 400), *sorted(dice.sample(range(start + 400, start + payload), 50))]:
        data = bytearray(scene.state)
        data[at] ^= 1 << dice.randrange(8)
        yield f"payload byte {at - start}", signed(bytes(data))


def forge(scene: Scene) -> None:
    """A forged state may cost its own sequence; it must not end the process or touch another one."""
    for name, data in forgeries(scene):
        print("case", name, flush=True)
        with contextlib.suppress(PerdureError):
            scene.ctx.load(data, 2)
        for seq, tokens in enumerate(HELD[:2]):
            if scene.ctx.tokens(seq) != tokens:
                print("bad", name, f"changed sequence {seq}")
        try:
            scene.ctx.clear(2)
        except PerdureError:
            scene.reopen()
        if complaint := scene.complaint():
            print("bad", name, complaint)


def attempt(scene: Scene, name: str, case: Case) -> None:
    print("case", name, flush=True)
    try:
        case(scene)
    except (PerdureError, TypeError):
        pass
    except BaseException as error:
        print("bad", name, f"raised {error!r}")
    else:
        print("bad", name, "was accepted")
    if complaint := scene.complaint():
        print("bad", name, complaint)


def main(group: str, folder: str, scratch: str) -> None:
    scene = Scene(Path(folder), Path(scratch))
    if group == "forgeries":
        forge(scene)
        print("done")
        return
    cases = PLANTED if group == "planted" else dict(flips(scene)) if group == "flips" else GROUPS[group]
    for name, case in cases.items():
        attempt(scene, name, case)
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
