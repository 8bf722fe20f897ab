"""safetensors files: those of the format's own library are read, and the other way; bad headers refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from perdure.errors import ModelFileError, ModelNotFoundError
from perdure.ext.weights.safetensors import read_safetensors
from perdure.ext.weights.tensors import Planned, TensorFile, from_floats, write_model

TABLE = np.arange(12, dtype=np.float32).reshape(3, 4) / 7


def raw(header: Any, data: bytes = bytes(16), *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(start: int = 0, end: int = 16, **more: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [4], "data_offsets": [start, end], **more}


def test_what_the_formats_library_writes_is_read(tmp_path: Path) -> None:
    save_file({"b": TABLE, "a": TABLE.astype(np.float16)}, tmp_path / "x.safetensors", {"format": "np"})
    with TensorFile(tmp_path / "x.safetensors") as file:
        assert file.metadata == {"format": "np"}
        np.testing.assert_array_equal(file.floats(file.tensors["b"]), TABLE)
        np.testing.assert_array_equal(file.floats(file.tensors["a"]), TABLE.astype(np.float16))
        assert file.tensors["a"].type == "F16"


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_what_is_written_can_be_read_by_the_formats_library(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.safetensors"
    tensor = Planned(
        name="é", type=kind, shape=(4, 3), pieces=lambda: [from_floats(kind, TABLE.astype(np.float32))]
    )
    write_model(path, [tensor], texts={"made": "here"})
    with TensorFile(path) as file:
        np.testing.assert_allclose(file.floats(file.tensors["é"]), TABLE, rtol=1e-2)
        assert file.metadata == {"made": "here"}
    if kind != "BF16":
        # NumPy has no such type.
        np.testing.assert_allclose(load_file(path)["é"], TABLE, rtol=1e-2)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "0 bytes"),
        (b"\x01\x02", "2 bytes"),
        (raw({}, length=1 << 40), "claims 1099511627776 bytes"),
        (raw({"a": entry()}, length=1000), "claims 1000 bytes"),
        (raw(b"[]"), "no JSON object"),
        (raw(b"{"), "no JSON"),
        (raw(b'{"a":' * 5000 + b"1" + b"}" * 5000), "nested too deeply|no JSON|needs dtype"),
        (raw(b'{"a": 1, "a": 2}'), "'a' twice"),
        (raw({"a": 1}), "needs dtype"),
        (raw({"a": entry(extra=1)}), "nothing else"),
        (raw({"a": entry(dtype="Q4")}), "unknown type 'Q4'"),
        (raw({"a": entry(dtype=["F32"])}), "unknown type"),
        (raw({"a": entry(shape=[-4])}), "impossible shape"),
        (raw({"a": entry(shape=[1 << 70])}), "impossible shape"),
        (raw({"a": entry(shape=[1] * 9 + [4])}), "impossible shape"),
        (raw({"a": entry(shape=[True, 4])}), "impossible shape"),
        (raw({"a": entry(shape=[5])}), "needs 20 bytes"),
        (raw({"a": entry(16, 0)}), "impossible offsets"),
        (raw({"a": entry(0, 16, shape=[1 << 62, 1 << 62])}), "needs"),
        (raw({"a": entry(16, 32)}), "ends at byte"),
        (raw({"a": entry(), "b": entry()}), "expected"),
        (raw({"a": entry(16, 32)}, bytes(32)), "expected"),
        (raw({"a": entry()}, bytes(24)), "end at byte"),
        (raw({"__metadata__": {"a": 1}, "a": entry()}), "table of texts"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=reason):
        read_safetensors(path)


def test_a_file_with_any_byte_changed_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    good = raw({"__metadata__": {"a": "b"}, "t": entry()})
    draw = random.Random(5)
    for _ in range(400):
        changed = bytearray(good)
        changed[draw.randrange(len(changed) - 16)] = draw.randrange(256)
        path.write_bytes(changed)
        try:
            for tensor in read_safetensors(path).tensors:
                assert tensor.offset + tensor.size <= len(good)
        except ModelFileError:
            pass


def test_a_file_that_is_not_there_or_none(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        read_safetensors(tmp_path / "none.safetensors")
    with pytest.raises(ModelFileError, match="is not a file"):
        read_safetensors(tmp_path)
