"""llama.cpp's quantiser, and importance matrices, in a child process that can be ended at any time.

The child (`quantize_child`) is given a job as JSON and prints a JSON object a line:

    {"done": 3, "of": 29}                  so many tensors, or chunks of text, are done
    {"error": "…", "kind": "ModelLoadError"}
    {"result": {…}}                        the last line of one that went well

It writes beside the output's place; the file is moved there, whole, when the child ended well.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perdure import EngineError, InvalidInputError, ModelFileError
from perdure.ext.weights.tensors import Planned, TensorFile, check_free_space, write_model
from perdure.spi.base import (
    TABLE_BYTES,
    TEMPORARY,
    check_whole,
    content_digest,
    errors,
    processes,
    read_lines,
    system,
)
from perdure.spi.llama import library
from perdure.spi.models import FILE_TYPES, TENSOR_TYPES, read_parts

CHUNK = 512
"""Tokens that are read at once for an importance matrix, as llama.cpp's own tool has it."""
TYPES = {name: number for number, name in FILE_TYPES.items()}
"""What a file can be quantised to, by name: the library's number for it."""
_TENSOR_TYPES = {kind.name: number for number, kind in TENSOR_TYPES.items()}
_SAID = 2000
"""Bytes of what a process said last."""
_PLAIN = ("F32", "F16", "BF16")
_SUMS, _COUNTS = ".in_sum2", ".counts"
_LONGEST_TEXT = 127
"""Bytes of a metadata text that the library writes."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """A file that was made."""

    path: Path
    bytes_before: int
    bytes_after: int
    tensors: int


def quantize(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    kind: str,
    *,
    importance: str | os.PathLike[str] | None = None,
    output_type: str | None = None,
    embedding_type: str | None = None,
    pure: bool = False,
    requantize: bool = False,
    provenance: bool = True,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Quantized:
    """Write `source` with its weights in another type (`Q4_K_M`, `Q8_0`, …), by llama.cpp itself.

    `importance` is an importance matrix (`importance_matrix` makes one); the smallest types need it. With
    `provenance` the file says what it was made from, and by what; without, it has the library's bytes and
    no others. A file that is quantised already loses more each time: `requantize` allows it.
    """
    kind = _type_name(kind, TYPES, "quantisation")
    output_type = output_type and _type_name(output_type, _TENSOR_TYPES, "output type")
    embedding_type = embedding_type and _type_name(embedding_type, _TENSOR_TYPES, "embedding type")
    check_whole("threads", 1 if threads is None else threads, 1, 512)
    origin, place = Path(source), Path(target)
    parts = read_parts(origin)
    tensors = [tensor for part in parts for tensor in part.tensors]
    before = sum(part.size for part in parts)
    packed = sorted({tensor.type.name for tensor in tensors} - set(_PLAIN))
    if packed and not requantize:
        raise InvalidInputError(
            f"{origin.name} is quantised already ({', '.join(packed)}): begin with an F32, F16 or BF16 file, "
            "or allow it with requantize (--requantize)"
        )
    if any(place.exists() and place.samefile(part.path) for part in parts):
        raise InvalidInputError(f"{place} is the file to read from; name another one to write")
    check_free_space(place, before)
    texts = {}
    if provenance:
        texts = {
            "perdure.version": version("perdure"),
            "perdure.engine": library.loaded().version,
            "perdure.quantize.type": kind,
            "perdure.quantize.source": origin.name,
            "perdure.quantize.source_sha256": content_digest(parts[0].path),
        }
        if importance is not None:
            texts["perdure.quantize.importance_sha256"] = content_digest(Path(importance))
    job = {
        "task": "quantize",
        "source": str(parts[0].path),
        "type": TYPES[kind],
        "output_type": _TENSOR_TYPES[output_type] if output_type else None,
        "embedding_type": _TENSOR_TYPES[embedding_type] if embedding_type else None,
        "pure": pure,
        "requantize": requantize,
        "importance": None if importance is None else str(importance),
        "texts": {key: _cut(text) for key, text in texts.items()},
        "threads": threads or system.usable_cores(),
    }
    run_child(job, place, progress)
    return Quantized(path=place, bytes_before=before, bytes_after=place.stat().st_size, tensors=len(tensors))


def importance_matrix(
    source: str | os.PathLike[str],
    texts: Sequence[str | os.PathLike[str]],
    target: str | os.PathLike[str],
    *,
    chunk: int = CHUNK,
    chunks: int | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """How much each column of each weight matters for text files: the mean square of what it is given.

    The file is llama.cpp's own (`llama-imatrix`). Texts are read `chunk` tokens at a time, `chunks` of
    them at most; what is left at the end and no whole chunk is not read.
    """
    if not texts:
        raise InvalidInputError("an importance matrix is made from texts; name a file with some")
    for text in texts:
        if not Path(text).is_file():
            raise InvalidInputError(f"there is no text file {text}")
    check_whole("chunk", chunk, 16, 1 << 16)
    check_whole("chunks", 1 if chunks is None else chunks, 1, 1 << 24)
    check_whole("threads", 1 if threads is None else threads, 1, 512)
    parts = read_parts(Path(source))
    check_free_space(Path(target), 64 << 20)
    job = {
        "task": "importance",
        "source": str(parts[0].path),
        "size": sum(part.size for part in parts),
        "texts": [str(text) for text in texts],
        "chunk": chunk,
        "chunks": chunks,
        "threads": threads or system.usable_cores(),
    }
    return run_child(job, Path(target), progress)


def write_importance(
    path: Path,
    sums: dict[str, NDArray[np.float64]],
    counts: dict[str, NDArray[np.int64]],
    *,
    datasets: Sequence[str],
    chunk: int,
    chunks: int,
) -> None:
    """Write an importance matrix: sums of squares by column, a row an expert, and how many there were."""
    planned = []
    for name in sorted(sums):
        for suffix, table in ((_SUMS, sums[name]), (_COUNTS, counts[name].reshape(-1, 1))):
            rows = np.ascontiguousarray(table, np.float32)
            planned.append(
                Planned(
                    name=name + suffix,
                    type="F32",
                    shape=rows.shape[::-1],
                    pieces=lambda rows=rows: [rows.reshape(-1).view(np.uint8)],  # type: ignore[misc]
                )
            )
    about: dict[str, str | int | float | Sequence[str]] = {
        "general.type": "imatrix",
        "imatrix.datasets": list(datasets),
        "imatrix.chunk_count": chunks,
        "imatrix.chunk_size": chunk,
    }
    write_model(path, planned, texts=about)


def read_importance(path: str | os.PathLike[str]) -> dict[str, NDArray[np.float32]]:
    """What each column of each tensor counts: the mean of squares. An expert that was never used counts 1."""
    with TensorFile(path) as file:
        if file.metadata.get("general.type") != "imatrix":
            raise ModelFileError(
                f"{path} is no importance matrix of llama.cpp's (general.type is not imatrix)"
            )
        importance = {}
        for name, tensor in file.tensors.items():
            if not name.endswith(_SUMS):
                continue
            of = name.removesuffix(_SUMS)
            counts = file.tensors.get(of + _COUNTS)
            if counts is None or tensor.type != "F32" or counts.type != "F32" or counts.width != 1:
                raise ModelFileError(f"{path} is damaged: {name} has no counts")
            sums, times = file.floats(tensor), file.floats(counts)
            if len(sums) != len(times) or not np.isfinite(sums).all() or not (times >= 0).all():
                raise ModelFileError(
                    f"{path} is damaged: {name} has {len(sums)} rows that do not fit its counts"
                )
            mean = np.where(times > 0, sums / np.maximum(times, 1), 1.0)
            importance[of] = mean.astype(np.float32).reshape(-1)
        return importance


def run_child(job: dict[str, Any], target: Path, progress: Progress | None) -> dict[str, Any]:
    """Have a child write `target`; give what it says of it. However this ends, no half file is left."""
    unfinished = target.with_name(f"{target.name}.{os.getpid()}{TEMPORARY}")
    child = Path(__file__).with_name("quantize_child.py")
    command = processes.isolated_python(str(child), json.dumps(job | {"target": str(unfinished)}))
    with tempfile.TemporaryFile() as captured_errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=captured_errors,
            env=os.environ | {"GGML_NO_BACKTRACE": "1"},
        )
        try:
            result = _follow(process, progress)
            code = process.wait()
            if result is None:
                captured_errors.seek(0, os.SEEK_END)
                captured_errors.seek(max(0, captured_errors.tell() - _SAID))
                last = captured_errors.read(_SAID).decode("utf-8", "replace").strip().splitlines()[-3:]
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                raise EngineError(
                    f"the process that was to write {target.name} ended ({how}): {' '.join(last)}"
                )
            with open(unfinished, "rb") as file:
                system.sync(file.fileno())
            os.replace(unfinished, target)
            system.sync_folder(target.parent)
            return result
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
            unfinished.unlink(missing_ok=True)


def _follow(process: subprocess.Popen[bytes], progress: Progress | None) -> dict[str, Any] | None:
    assert process.stdout is not None
    result: dict[str, Any] | None = None
    for line in read_lines(process.stdout, TABLE_BYTES, "what the process prints"):
        try:
            message = json.loads(line)
        except ValueError:
            # A library may print lines, too.
            continue
        if not isinstance(message, dict):
            continue
        if "error" in message:
            kind = getattr(errors, str(message.get("kind")), EngineError)
            raise kind(message["error"])
        if "of" in message and progress is not None:
            progress(message["done"], message["of"])
        result = message.get("result", result)
    return result


def _type_name(text: str, known: dict[str, int], what: str) -> str:
    name = next((name for name in known if name.lower() == text.lower()), None)
    if name is None:
        raise InvalidInputError(f"there is no {what} {text!r}; there are {', '.join(known)}")
    return name


def _cut(text: str) -> str:
    return text.encode()[:_LONGEST_TEXT].decode("utf-8", "ignore")
