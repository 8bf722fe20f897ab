"""The toy models are what they say they are. Driven through the bare engine, with nothing of ours between."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import zoo
from perdure.engine.llama.native import declarations, library
from zoo import tokenizer

Logits = npt.NDArray[np.float32]
ZooPath = Callable[[str], Path]

llama = library.load()

ON = 1
Q8_0 = 8

every_model = pytest.mark.parametrize("name", zoo.names())

# Enough to leave gemma3's window of 32 many times over.
PROMPT = [(7 * i * i + 3 * i + 11) % 380 for i in range(300)]


class Toy:
    """One model and one context on it, with a stream of cells for each of four sequences."""

    def __init__(self, model: Any, context: Any) -> None:
        self.model = model
        self.context = context
        self.vocab = llama.llama_model_get_vocab(model)
        self.size = int(llama.llama_vocab_n_tokens(self.vocab))

    def decode(self, tokens: list[int], *, start: int = 0, sequence: int = 0) -> Logits:
        """The logits after each of the tokens, one row each."""
        count = len(tokens)
        batch = declarations.LlamaBatch.of((ctypes.c_int32 * count)(*tokens))
        batch.pos = (ctypes.c_int32 * count)(*range(start, start + count))
        batch.n_seq_id = (ctypes.c_int32 * count)(*[1] * count)
        batch.seq_id = (ctypes.POINTER(ctypes.c_int32) * count)(
            *[ctypes.pointer(ctypes.c_int32(sequence)) for _ in tokens]
        )
        batch.logits = (ctypes.c_int8 * count)(*[1] * count)
        assert llama.llama_decode(self.context, batch) == 0
        rows = (llama.llama_get_logits_ith(self.context, index) for index in range(len(tokens)))
        return np.stack([np.ctypeslib.as_array(row, (self.size,)).copy() for row in rows])

    def tokenize(self, text: str, *, special: bool = False) -> list[int]:
        raw = text.encode()
        buffer = (declarations.Token * (len(raw) + 1))()
        count = llama.llama_tokenize(self.vocab, raw, len(raw), buffer, len(buffer), True, special)
        assert count >= 0
        return list(buffer[:count])

    def piece(self, token: int) -> bytes:
        buffer = (ctypes.c_char * 64)()
        count = llama.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, True)
        assert count >= 0
        return buffer.raw[:count]


@contextmanager
def opened(path: Path, *, cells: int = 512, kv_type: int | None = None) -> Iterator[Toy]:
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    assert model
    try:
        params = llama.llama_context_default_params()
        params.n_seq_max = 4
        params.n_ctx = cells * params.n_seq_max
        params.n_batch = params.n_ubatch = cells
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = ON
        params.kv_unified = False
        params.swa_full = False
        if kv_type is not None:
            params.type_k = params.type_v = kv_type
        context = llama.llama_init_from_model(model, params)
        assert context
        try:
            yield Toy(model, context)
        finally:
            llama.llama_free(context)
    finally:
        llama.llama_model_free(model)


_silence = declarations.LogCallback(lambda level, text, data: None)


@pytest.fixture(scope="module", autouse=True)
def _quiet_engine() -> Iterator[None]:
    """The engine's log goes nowhere here, and back to where it went before afterwards."""
    callback, data = declarations.LogCallback(), ctypes.c_void_p()
    llama.llama_log_get(ctypes.byref(callback), ctypes.byref(data))
    llama.llama_log_set(_silence, None)
    yield
    llama.llama_log_set(callback, data)


@pytest.fixture(scope="module")
def toy_llama(zoo_path: ZooPath) -> Iterator[Toy]:
    with opened(zoo_path("llama")) as toy:
        yield toy


@every_model
def test_the_engine_sees_the_memory_kind_that_the_recipe_names(name: str, zoo_path: ZooPath) -> None:
    recipe = zoo.ZOO[name]
    with opened(zoo_path(name)) as toy:
        assert llama.llama_model_is_recurrent(toy.model) == (recipe.memory == "recurrent")
        assert llama.llama_model_is_hybrid(toy.model) == (recipe.memory == "hybrid")
        assert llama.llama_model_n_swa(toy.model) == (recipe.window or 0)
        assert (recipe.window is not None) == (recipe.memory == "sliding")
        assert toy.size == recipe.vocabulary


@every_model
def test_logits_are_finite_and_differ_from_place_to_place(name: str, zoo_path: ZooPath) -> None:
    with opened(zoo_path(name)) as toy:
        logits = toy.decode(PROMPT)
    assert np.isfinite(logits).all()
    assert logits.std(axis=1).min() > 1
    assert logits.std(axis=0).mean() > 1
    assert np.abs(logits).max() < 50


@every_model
def test_the_same_tokens_give_the_same_logits(name: str, zoo_path: ZooPath) -> None:
    with opened(zoo_path(name)) as toy:
        first = toy.decode(PROMPT, sequence=0)
        other_stream = toy.decode(PROMPT, sequence=3)
    with opened(zoo_path(name)) as toy:
        other_context = toy.decode(PROMPT, sequence=0)
    np.testing.assert_array_equal(first, other_stream)
    np.testing.assert_array_equal(first, other_context)


@every_model
@pytest.mark.parametrize("changed", [0, 40, 270])
def test_one_early_token_shows_in_late_logits(name: str, changed: int, zoo_path: ZooPath) -> None:
    other = [*PROMPT]
    other[changed] = (other[changed] + 7) % 380
    with opened(zoo_path(name)) as toy:
        difference = np.abs(toy.decode(PROMPT, sequence=0) - toy.decode(other, sequence=1))
    assert difference[:changed].max(initial=0) == 0
    assert difference[-1].max() > 0.05


@every_model
def test_greedy_text_does_not_stick_to_one_token(name: str, zoo_path: ZooPath) -> None:
    chosen: list[int] = []
    with opened(zoo_path(name)) as toy:
        logits = toy.decode(PROMPT[:20])
        for position in range(20, 120):
            chosen.append(int(logits[-1].argmax()))
            logits = toy.decode(chosen[-1:], start=position)
    assert len(set(chosen)) >= 20


@pytest.mark.parametrize("name", [name for name in zoo.names() if zoo.ZOO[name].memory != "recurrent"])
def test_keys_and_values_can_be_quantised(name: str, zoo_path: ZooPath) -> None:
    with opened(zoo_path(name)) as toy:
        exact = toy.decode(PROMPT)
    with opened(zoo_path(name), kv_type=Q8_0) as toy:
        rounded = toy.decode(PROMPT)
    assert 0 < np.abs(exact - rounded).mean() < 0.5


def test_files_come_out_the_same_in_every_process(tmp_path: Path, zoo_path: ZooPath) -> None:
    script = "import sys, zoo, pathlib; [zoo.write(name, pathlib.Path(sys.argv[1])) for name in zoo.names()]"
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, cwd=Path(__file__).parent)
    for name in zoo.names():
        again, before = tmp_path / f"{name}.gguf", zoo_path(name)
        assert hashlib.sha256(again.read_bytes()).digest() == hashlib.sha256(before.read_bytes()).digest()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{name}.gguf" for name in zoo.names())


@given(text=st.text())
@example(text="👩‍👩‍👧‍👦 🇳🇱 한국어 각 각 é e\u0301 ffi \r\n\t\x00 \u200b nbsp\u00a0end  ")
@example(text="<|im_start|>user\nit's 12345 o'clock<|im_end|>\n")
def test_any_text_survives_the_tokenizer(text: str, toy_llama: Toy) -> None:
    for special in (False, True):
        tokens = toy_llama.tokenize(text, special=special)
        assert b"".join(map(toy_llama.piece, tokens)).decode() == text


def test_every_byte_is_a_token(toy_llama: Toy) -> None:
    assert [toy_llama.piece(token) for token in range(256)] == [bytes([byte]) for byte in range(256)]


@pytest.mark.parametrize("text", ["the", " the", "ing", " and", " of", " question", "user"])
def test_common_english_comes_out_as_one_token(text: str, toy_llama: Toy) -> None:
    assert len(toy_llama.tokenize(text)) == 1


def test_control_tokens_are_read_only_where_asked_for(toy_llama: Toy) -> None:
    turn_start, turn_end = (
        tokenizer.vocabulary().id(control) for control in (tokenizer.TURN_START, tokenizer.TURN_END)
    )
    assert toy_llama.tokenize("<|im_start|><|im_end|>", special=True) == [turn_start, turn_end]
    assert {turn_start, turn_end}.isdisjoint(toy_llama.tokenize("<|im_start|><|im_end|>"))
    assert llama.llama_vocab_eos(toy_llama.vocab) == turn_end
    assert llama.llama_vocab_is_eog(toy_llama.vocab, turn_end)
    assert not llama.llama_vocab_is_eog(toy_llama.vocab, turn_start)
    assert not llama.llama_vocab_get_add_bos(toy_llama.vocab)


def test_the_chat_template_is_in_the_file(toy_llama: Toy) -> None:
    assert llama.llama_model_chat_template(toy_llama.model, None).decode() == tokenizer.CHATML


def test_the_adapter_changes_what_the_model_says(zoo_path: ZooPath) -> None:
    with opened(zoo_path("llama")) as toy:
        plain = toy.decode(PROMPT, sequence=0)
        adapter = llama.llama_adapter_lora_init(toy.model, str(zoo_path("llama-lora")).encode())
        assert adapter
        adapters, scales = (declarations.Adapter * 1)(adapter), (ctypes.c_float * 1)(1.0)
        assert llama.llama_set_adapters_lora(toy.context, adapters, 1, scales) == 0
        adapted = toy.decode(PROMPT, sequence=1)
    assert np.isfinite(adapted).all()
    assert np.abs(plain - adapted).max() > 1


def test_the_wide_llama_has_the_vocabulary_of_a_large_model(zoo_path: ZooPath) -> None:
    with opened(zoo_path("llama-wide"), cells=256) as toy:
        assert toy.size == 262_144
        logits = toy.decode(PROMPT[:8])
        assert toy.piece(toy.size - 1) == b"<262143>"
    assert np.isfinite(logits).all()
    assert logits.std(axis=1).min() > 1
