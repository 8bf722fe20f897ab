"""Runs llama.cpp's quantiser, or reads texts for an importance matrix: `python -P quantize_child.py JOB`.

`quantize` starts it and reads what it prints. It ends with its parent.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

_LARGEST_TEXT = 1 << 30
_LINE = re.compile(r"^\[\s*(\d+)/\s*(\d+)\]")


def main(job: dict[str, Any]) -> None:
    from perdure import PerdureError
    from perdure.spi.base import processes

    processes.die_with_parent()
    processes.leave_no_core()
    try:
        say({"result": quantize(job) if job["task"] == "quantize" else importance(job)})
    except PerdureError as error:
        say({"error": str(error), "kind": type(error).__name__})
        raise SystemExit(1) from None


def quantize(job: dict[str, Any]) -> dict[str, Any]:
    """Have the library write the file."""
    from perdure import EngineError, InvalidInputError
    from perdure.ext.weights.structures import Override
    from perdure.spi.llama import captured_errors, library

    lib = library.load()
    if not hasattr(lib, "llama_model_quantize"):
        raise EngineError(
            f"{library.build()} has no quantiser: `perdure engine install` fetches a library that has one"
        )
    params = lib.llama_model_quantize_default_params()
    # What it begins with is known. Behind that versions differ, and it stays as the library has it.
    pointers = (params.imatrix, params.kv_overrides, params.tt_overrides, params.prune_layers)
    if (params.nthread, bytes(params)[16:22], *pointers) != (0, b"\0\1\0\0\0\0", *[None] * 4):
        raise EngineError(
            f"llama.cpp {lib.version} lays its quantiser's settings out otherwise than perdure knows: "
            "`perdure engine install` fetches one that fits"
        )
    params.nthread = job["threads"]
    params.ftype = job["type"]
    params.pure = job["pure"]
    params.allow_requantize = job["requantize"]
    if job["output_type"] is not None:
        params.output_tensor_type = job["output_type"]
    if job["embedding_type"] is not None:
        params.token_embedding_type = job["embedding_type"]
    overrides = (Override * (len(job["texts"]) + 1))()
    for override, (key, text) in zip(overrides, job["texts"].items(), strict=False):
        override.tag, override.key, override.text = Override.TEXT, key.encode(), text.encode()
    if job["texts"]:
        params.kv_overrides = ctypes.addressof(overrides)
    rows, matrix = _importance_rows(job["importance"])
    if rows is not None:
        params.imatrix = ctypes.addressof(rows)
    log = logging.getLogger("perdure.llama")
    log.setLevel(logging.DEBUG)
    log.addHandler(_Lines())
    with captured_errors() as reasons:
        code = lib.llama_model_quantize(
            os.fsencode(job["source"]), os.fsencode(job["target"]), ctypes.byref(params)
        )
    del matrix
    if code:
        reason = str(reasons)
        if "imatrix" in reason or "importance" in reason.lower():
            raise InvalidInputError(
                f"llama.cpp needs an importance matrix for this type ({reason}): "
                "give texts (--importance-text FILE) or a matrix (--importance FILE)"
            )
        raise EngineError(f"llama.cpp could not quantise {job['source']}: {reason}")
    return {}


def _importance_rows(path: str | None) -> tuple[Any, Any]:
    """The library's array for an importance matrix, and what must outlive it."""
    from perdure.ext.weights.quantize import read_importance
    from perdure.ext.weights.structures import ImportanceRow

    if path is None:
        return None, None
    matrix = read_importance(path)
    rows = (ImportanceRow * (len(matrix) + 1))()
    pointer = ctypes.POINTER(ctypes.c_float)
    for row, (name, values) in zip(rows, matrix.items(), strict=False):
        row.name, row.data, row.size = name.encode(), values.ctypes.data_as(pointer), len(values)
    return rows, matrix


def importance(job: dict[str, Any]) -> dict[str, Any]:
    """Read texts and note what each weight's columns are given."""
    from perdure import EngineError, InvalidInputError
    from perdure.ext.weights.quantize import write_importance
    from perdure.spi.base import read_file
    from perdure.spi.llama import CPU_ONLY, EvalCallback, LlamaBatch, LlamaTokenizer, LlamaWeights, library

    lib = library.load()
    weights = LlamaWeights(
        Path(job["source"]), size=job["size"], offload=CPU_ONLY, tensor_split=None, progress=None
    )
    tokenizer = LlamaTokenizer(weights)
    tokens: list[int] = []
    for path in job["texts"]:
        text = read_file(Path(path), _LARGEST_TEXT, regular=False).decode("utf-8", "replace")
        tokens += tokenizer.tokenize(text, special=False, bos=False)
    bos = lib.llama_vocab_bos(weights.vocab) if lib.llama_vocab_get_add_bos(weights.vocab) else -1
    size = job["chunk"]
    count = min(len(tokens) // size, job["chunks"] or len(tokens))
    if not count:
        raise InvalidInputError(
            f"the texts have {len(tokens)} tokens, one chunk has {size}: give more text, or a smaller chunk"
        )
    collector = Collector(lib)
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = size
    # Rows for all tokens: else the last layer would see one of them alone.
    params.n_outputs_max = size
    params.n_threads = params.n_threads_batch = job["threads"]
    params.no_perf = True
    callback = EvalCallback(collector)
    params.cb_eval = callback
    context = lib.llama_init_from_model(weights.handle, params)
    if not context:
        raise EngineError(f"the engine could not open a context of {size} tokens")
    rows = (ctypes.c_int8 * size)(*([1] * size))
    for index in range(count):
        piece = tokens[index * size : (index + 1) * size]
        if bos >= 0:
            piece[0] = bos
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        batch = LlamaBatch.of((ctypes.c_int32 * size)(*piece))
        batch.logits = rows
        if lib.llama_decode(context, batch) or collector.problem:
            raise EngineError(f"the engine could not read the texts: {collector.problem or 'a step failed'}")
        say({"done": index + 1, "of": count})
    lib.llama_free(context)
    names = [Path(path).name for path in job["texts"]]
    write_importance(
        Path(job["target"]), collector.sums, collector.counts, datasets=names, chunk=size, chunks=count
    )
    return {"chunks": count, "tokens": count * size, "tensors": len(collector.sums)}


class Collector:
    """The evaluation callback: sums the squares of what each weight is multiplied with, by column.

    The engine asks about each node of the graph, and shows those that were asked for once they are computed.
    """

    _SHORTEST = 16
    """Columns of a product that is a reading of text; shorter ones are something else."""

    def __init__(self, lib: Any) -> None:
        from perdure import EngineError
        from perdure.spi.llama import GraphTensor

        # The size of the struct and of the object before it, which has 32 bytes.
        if lib.ggml_tensor_overhead() != ctypes.sizeof(GraphTensor) + 32:
            raise EngineError(
                "importance matrices cannot be made with this llama.cpp: its tensors are laid out otherwise"
            )
        self._lib = lib
        self._node = GraphTensor
        self._names: dict[int, str] = {}
        self.sums: dict[str, Any] = {}
        self.counts: dict[str, Any] = {}
        self.problem = ""

    def __call__(self, address: int, ask: bool, _: object) -> bool:
        try:
            node = self._node.from_address(address)
            operation = self._operation(node.operation)
            if operation not in ("MUL_MAT", "MUL_MAT_ID"):
                return not ask
            weight, activations = node.inputs[0].contents, node.inputs[1].contents
            name = weight.name.decode("utf-8", "replace")
            if activations.type != 0 or not (name.startswith("blk.") or name == "output.weight"):
                return not ask
            if operation == "MUL_MAT" and activations.shape[1] < self._SHORTEST:
                return not ask
            if not ask:
                self._add(
                    name, weight, activations, node.inputs[2].contents if operation == "MUL_MAT_ID" else None
                )
            return True
        except Exception as error:  # nothing may leave a callback
            self.problem = self.problem or repr(error)
            return False

    def _operation(self, number: int) -> str:
        if number not in self._names:
            self._names[number] = self._lib.ggml_op_name(number).decode()
        return self._names[number]

    def _add(self, name: str, weight: Any, activations: Any, chosen: Any) -> None:
        import numpy as np

        numbers = self._read(activations, "<f4")
        squares = np.square(numbers, dtype=np.float64)
        width, experts = weight.shape[0], weight.shape[2]
        sums = self.sums.setdefault(name, np.zeros((experts, width)))
        counts = self.counts.setdefault(name, np.zeros(experts, np.int64))
        if chosen is None:
            # One matrix, or several that take the planes of the activations in turn.
            for index, plane in enumerate(squares.sum(axis=2).reshape(-1, width)):
                sums[index % experts] += plane
                counts[index % experts] += squares.shape[2]
            return
        ids = self._read(chosen, "<i4")[0, 0]
        given_rows = squares[0]
        for slot in range(ids.shape[1]):
            np.add.at(sums, ids[:, slot], given_rows[:, slot % given_rows.shape[1]])
            np.add.at(counts, ids[:, slot], 1)

    def _read(self, tensor: Any, dtype: str) -> Any:
        """A tensor's numbers, the slowest dimension first, wherever they are."""
        import numpy as np

        shape, strides = list(tensor.shape)[::-1], list(tensor.strides)[::-1]
        size = 4 + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
        raw = np.empty(size, np.uint8)
        self._lib.ggml_backend_tensor_get(ctypes.addressof(tensor), raw.ctypes.data, 0, size)
        return np.ndarray(shape, dtype, raw, 0, strides)


class _Lines(logging.Handler):
    """Tells how many tensors are done, as the library says."""

    def emit(self, record: logging.LogRecord) -> None:
        if match := _LINE.match(record.getMessage()):
            say({"done": int(match[1]), "of": int(match[2])})


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
