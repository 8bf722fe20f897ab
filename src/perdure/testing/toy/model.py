"""Toy weights and a vocabulary of bytes."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Never

import numpy as np

from perdure.checks import check_whole
from perdure.closing import Closing
from perdure.engine.context import Context
from perdure.engine.contract import Capabilities, ModelInfo, check_token
from perdure.engine.embedder import CHUNK, Embedder, Pooling
from perdure.engine_config import N_CTX, SLOTS, ContextConfig, KvType
from perdure.errors import ClosedError, InvalidInputError, ModelNotFoundError, OutOfMemoryError
from perdure.identity import Identity
from perdure.memory import FullAttention, MemorySpec
from perdure.options import refuse_unknown
from perdure.testing.toy.core import TextEnding, ToyAdapter, ToyCore
from perdure.testing.toy.faults import Faults

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_IDS = {text: 256 + index for index, text in enumerate(SPECIAL)}
_ENDS = frozenset({_IDS["<|endoftext|>"], _IDS["<|im_end|>"]})
_CERTAIN = 100
"""A difference of logits that leaves nothing to chance."""
_ROWS = 16
_WINDOW = 8


class ToyModel(Closing):
    """Weights that are one number, over a vocabulary of the 256 bytes and a few marks.

    The same seed, kind and window always give the same logits for the same tokens, at any batch shape.
    """

    path: Path | None = None
    gpu_layers = 0
    experts_on_gpu = False
    traces = False

    def __init__(
        self,
        kind: type[MemorySpec] = FullAttention,
        *,
        window: int = _WINDOW,
        seed: int = 0,
        faults: Faults | None = None,
        marks: Iterable[str] = (),
        reply_tokens: int | None = None,
    ) -> None:
        """`marks` are further control tokens, for templates that have others. With `reply_tokens` a reply in
        a chat is so many small letters and spaces long; else it is any text, and ends by chance."""
        if window < 1:
            raise InvalidInputError(f"a window holds at least 1 token, got {window}")
        if reply_tokens is not None:
            check_whole("reply_tokens", reply_tokens, 1)
            if kind is not FullAttention:
                raise InvalidInputError(
                    "reply_tokens is for full attention: other kinds forget where one began"
                )
        self._memory = kind(window=window if kind.has_window else None)
        self._special = (*SPECIAL, *sorted(set(marks) - set(SPECIAL)))
        self._ids = {text: 256 + index for index, text in enumerate(self._special)}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._marks = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        words = f"toy/{kind.name}/{self._memory.window}/{seed}{''.join(self._special[len(SPECIAL) :])}"
        words += "" if reply_tokens is None else f"/{reply_tokens}"
        self._digest = hashlib.sha256(words.encode()).hexdigest()
        self._reply_tokens = reply_tokens
        self._faults = faults or Faults()
        self._closed = False
        self.n_vocab = 256 + len(self._special)
        # Likely text is readable, and ends now and then.
        self._bias = np.full(self.n_vocab, -12, np.float32)
        self._bias[[10, *range(32, 127), _IDS["<|im_end|>"]]] = 0
        if reply_tokens is not None:
            self._bias[:] = -_CERTAIN
            self._bias[[32, *range(97, 123)]] = 0

    # What it is.

    @property
    def memory(self) -> MemorySpec:
        return self._memory

    @property
    def info(self) -> ModelInfo:
        self._check_open()
        return ModelInfo(
            architecture="toy",
            name=f"toy {self._memory.name}",
            n_ctx_train=self.n_ctx_train,
            template=CHATML,
        )

    @property
    def metadata(self) -> Mapping[str, str]:
        self._check_open()
        return MappingProxyType({"toy.memory": self._memory.name})

    @property
    def digest(self) -> str:
        return self._digest

    @property
    def n_ctx_train(self) -> int:
        return 4096

    @property
    def bos(self) -> int | None:
        return None

    @property
    def eos(self) -> int | None:
        return _IDS["<|im_end|>"]

    @property
    def closed(self) -> bool:
        return self._closed

    # Text.

    def tokenize(self, text: str, *, special: bool = False, bos: bool = True) -> list[int]:
        """`text` as its UTF-8 bytes; `special` reads marks as tokens. No token is put before a text."""
        self._check_open()
        try:
            text.encode()
        except (UnicodeEncodeError, AttributeError) as error:
            raise InvalidInputError(f"text to tokenize must be valid Unicode text: {error}") from None
        pieces = self._marks.split(text) if special else [text]
        ids: list[int] = []
        for piece in pieces:
            ids.extend([self._ids[piece]] if special and piece in self._ids else piece.encode())
        return ids

    def detokenize(self, tokens: Iterable[int], *, special: bool = False) -> str:
        return b"".join(self.piece(token, special=special) for token in tokens).decode("utf-8", "replace")

    def piece(self, token: int, *, special: bool = False) -> bytes:
        token = self._check_token(token)
        if token < 256:
            return bytes([token])
        return self._special[token - 256].encode() if special else b""

    def is_end(self, token: int) -> bool:
        return self._check_token(token) in _ENDS

    def is_control(self, token: int) -> bool:
        """Whether `token` is a mark for the model, never text."""
        return self._check_token(token) >= 256

    @property
    def ends(self) -> frozenset[int]:
        return _ENDS

    @property
    def controls(self) -> frozenset[int]:
        return frozenset(range(256, self.n_vocab))

    # Contexts.

    def adapter(self, path: str, *, layers: tuple[int, int] | None = None) -> ToyAdapter:
        """An adapter for this model; its name is all that it is. One whose name ends in "on TOKENS" is
        activated by these: `adapter("judge on 5 6")`. There is none whose name starts with "missing"."""
        self._check_open()
        name, _, invocation = path.partition(" on ")
        if name.startswith("missing"):
            raise ModelNotFoundError(f"there is no adapter {path!r}")
        digest = hashlib.sha256(f"{path} {layers}".encode()).hexdigest()
        return ToyAdapter(self._digest, digest, tuple(map(int, invocation.split())))

    def context(
        self,
        *,
        n_ctx: int = N_CTX,
        n_seq: int = 1,
        shared: bool = False,
        n_batch: int = 512,
        threads: int | None = None,
        swa_full: bool = True,
        trace: object = None,
        **unknown: Never,
    ) -> Context:
        """A context of `n_seq` sequences that hold `n_ctx` tokens each. It starts no threads."""
        refuse_unknown(unknown, self.context)
        self._check_open()
        if trace is not None:
            raise InvalidInputError("the toy engine has no layers that could be traced: leave trace out")
        _check_counts(n_ctx=n_ctx, n_seq=n_seq, n_batch=n_batch)
        n_batch = max(min(n_batch, n_ctx), n_seq)
        rows = max(min(_ROWS, n_batch), n_seq)
        memory = dataclasses.replace(self._memory, keeps_window=swa_full)
        cells = n_ctx * n_seq if shared else n_ctx
        core = self._core(memory, n_seq=n_seq, n_batch=n_batch, cells=cells, max_outputs=rows, shared=shared)

        def identity(adapters: str) -> Identity:
            return Identity(
                weights=self._digest,
                tokenizer="bytes",
                template="chatml",
                adapters=adapters,
                attention="toy",
                rope="none",
                window=memory.identity,
                layout="cells",
                engine="toy 1",
                kernels="python",
                devices="none",
                **KvType("token", "token").keywords,
            )

        return Context(
            core,
            memory=memory,
            capabilities=Capabilities(
                truncate=memory.cuts, shift=False, abort=True, shared=shared, max_outputs=rows
            ),
            identity=identity,
            n_ctx=n_ctx,
            n_seq=n_seq,
            n_batch=n_batch,
        )

    def spare_sequences(self, n_ctx: int, config: ContextConfig) -> int:
        """It computes in the machine's own memory."""
        return 0

    def fit_context(self, n_ctx: int | None, slots: int | None, config: ContextConfig) -> tuple[int, int]:
        """Its state is a few bytes a token: as much as is usual."""
        return n_ctx or N_CTX, slots or SLOTS

    def embedder(self, *, n_ctx: int = N_CTX, threads: int | None = None) -> Embedder:
        """A context that makes vectors of texts of up to `n_ctx` tokens."""
        self._check_open()
        _check_counts(n_ctx=n_ctx)
        chunk = min(CHUNK, n_ctx)
        core = self._core(self._memory, n_seq=1, n_batch=chunk, cells=n_ctx, max_outputs=chunk, shared=False)
        return Embedder(core, pooling=Pooling.MEAN, n_ctx=n_ctx, chunk=chunk)

    def close(self) -> None:
        """Take no more calls. Open contexts go on."""
        self._closed = True

    def __repr__(self) -> str:
        return f"<ToyModel {self._memory.name}{', closed' if self._closed else ''}>"

    def _core(self, memory: MemorySpec, *, n_seq: int, cells: int, shared: bool, **sizes: int) -> ToyCore:
        if self._faults.no_memory:
            total = cells if shared else cells * n_seq
            raise OutOfMemoryError(
                f"the engine could not open a context of {total} cells: try a smaller n_ctx or n_seq"
            )
        ending = None
        if self._reply_tokens is not None:
            length = len("assistant\n") + self._reply_tokens
            ending = TextEnding(
                opened=_IDS["<|im_start|>"], end=_IDS["<|im_end|>"], length=length, by=2 * _CERTAIN
            )
        return ToyCore(
            memory=memory,
            weights=self._digest,
            bias=self._bias,
            ending=ending,
            n_seq=n_seq,
            cells=cells,
            shared=shared,
            faults=self._faults,
            **sizes,
        )

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this toy model is closed")

    def _check_token(self, token: int) -> int:
        self._check_open()
        return check_token(token, self.n_vocab)


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        check_whole(name, value, 1)
