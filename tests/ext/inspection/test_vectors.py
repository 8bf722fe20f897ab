"""Control vectors from contrast pairs, used by the adapters that there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import perdure
from perdure import InvalidInputError, Model, StepLogits
from perdure.cli import main
from perdure.ext.inspection.vectors import ContrastPair, directions, read_pairs, write_vector

ZooPath = Callable[[str], Path]
PAIRS = [
    ContrastPair("a happy day", "a sad day"),
    ContrastPair("what a happy song", "what a sad song"),
    ContrastPair("the happy cat", "the sad cat"),
]


@pytest.mark.parametrize("method", ["mean", "pca"])
def test_a_vector_moves_hidden_states_by_what_it_says(zoo_path: ZooPath, tmp_path: Path, method: str) -> None:
    model = Model(zoo_path("llama"))
    rows = directions(model, PAIRS, method=method)  # type: ignore[arg-type]
    assert rows.shape == (2, 64)
    write_vector(tmp_path / "v.gguf", rows, model.info.architecture)
    vector = model.adapter(tmp_path / "v.gguf")
    tokens = model.tokenize("a separate text")
    before = model.trace(tokens).hidden
    with model.context(n_ctx=256, threads=1) as ctx:
        ctx.adapt({vector: 0.5})
        ctx.decode(tokens)
        after = ctx.trace().hidden
    assert before is not None
    assert after is not None
    # Layer 1 is the first that is moved: by half the vector, at every token.
    np.testing.assert_allclose(after[0], before[0], atol=1e-4)
    moved = after[1] - before[1]
    np.testing.assert_allclose(moved, np.broadcast_to(0.5 * rows[0], moved.shape), atol=2e-2)


def test_the_mean_is_the_average_difference(zoo_path: ZooPath) -> None:
    model = Model(zoo_path("llama"))
    expected = []
    for pair in PAIRS:
        one, other = (model.trace(model.tokenize(text)).hidden for text in (pair.positive, pair.negative))
        assert one is not None
        assert other is not None
        expected.append(one[1:, -1] - other[1:, -1])
    np.testing.assert_allclose(directions(model, PAIRS), np.mean(expected, axis=0), atol=1e-4)


def test_the_command_writes_what_requests_use(
    zoo_path: ZooPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    lines = '{"positive": "a happy day", "negative": "a sad day"}\n\n{"positive": "x", "negative": "y"}\n'
    (tmp_path / "pairs.jsonl").write_text(lines)
    arguments = [str(tmp_path / "pairs.jsonl"), str(tmp_path / "v.gguf"), "-m", str(zoo_path("llama"))]
    monkeypatch.setattr("sys.argv", ["perdure", "vectors", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    with perdure.open(zoo_path("llama"), n_ctx=256, slots=1, threads=1) as rt:
        plain = rt.generate("a text", max_tokens=8, temperature=0, adapters={})
        steered = rt.generate("a text", max_tokens=8, temperature=0, adapters={str(tmp_path / "v.gguf"): 8.0})
    assert plain.tokens != steered.tokens


def test_bad_pairs_are_refused_with_their_line(tmp_path: Path, zoo_path: ZooPath) -> None:
    file = tmp_path / "pairs.jsonl"
    for line in ("[]", "{}", '{"positive": 1, "negative": "a"}', "\x00", '{"positive": "a"'):
        file.write_text('{"positive": "a", "negative": "b"}\n' + line)
        with pytest.raises(InvalidInputError, match="line 2: a pair is"):
            read_pairs(file)
    with pytest.raises(InvalidInputError, match="are the same"):
        ContrastPair("a", "a")
    with pytest.raises(InvalidInputError, match="1 to 4096 contrast pairs, got 0"):
        directions(Model(zoo_path("llama")), [])
    with pytest.raises(InvalidInputError, match="method is one of mean, pca"):
        directions(Model(zoo_path("llama")), PAIRS, method="best")  # type: ignore[arg-type]


@pytest.mark.parametrize("speculate", [0, 4])
def test_a_processor_reads_the_trace_of_its_step(zoo_path: ZooPath, speculate: int) -> None:
    seen = []

    def processor(tokens: Sequence[int], logits: StepLogits) -> NDArray[np.float32]:
        trace = logits.trace(layers=[0, 2])
        assert trace.tokens == tuple(tokens)
        assert trace.hidden is not None
        seen.append((trace.hidden.shape, float(np.abs(trace.logits - logits.copy()).max())))
        return logits.copy()

    with perdure.open(zoo_path("llama"), n_ctx=256, slots=1, threads=1) as rt:
        prompt = [5, 6, 7, 5, 6, 7, 5, 6, 7]
        options = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, "speculate": speculate}
        plain = rt.generate(prompt, **options)  # type: ignore[arg-type]
        traced = rt.generate(prompt, processors=[processor], **options)  # type: ignore[arg-type]
    assert traced.tokens == plain.tokens
    assert [shape for shape, _ in seen] == [(2, 9 + at, 64) for at in range(3)]
    # What the layers of the trace lead to is what was drawn from.
    assert max(away for _, away in seen) < 0.1
