"""A llama.cpp context behind the `Core` calls: tokens in, bytes and rows out, nothing decided."""

from __future__ import annotations

import ctypes
import functools
import operator
import threading
from collections.abc import Mapping, Sequence
from ctypes import byref
from typing import TYPE_CHECKING, Any, NamedTuple, Required, TypedDict

import numpy as np
from numpy.typing import NDArray

from perdure import system
from perdure.engine.contract import Batch, BatchPart, Capture, Floats, Outcome
from perdure.engine.llama.native import declarations, library
from perdure.engine.llama.native.declarations import (
    MAX_THREADS,
    FreeThreadpool,
    Functions,
    NewThreadpool,
    ThreadpoolParams,
)
from perdure.engine.llama.native.log_sink import captured_errors
from perdure.engine.llama.weights import LlamaWeights
from perdure.errors import ClosedError, EngineError, InvalidInputError, OutOfMemoryError
from perdure.memory import MemorySpec

if TYPE_CHECKING:
    from perdure.engine.core import Adapter
    from perdure.engine.llama.adapters import ControlVector, LlamaAdapter
    from perdure.engine.llama.native.layout import StateLayout
    from perdure.engine.llama.scratch import Scratch


_BEYOND = 1 << 30
"""A position that no token has."""
_MAIN_THREAD = threading.main_thread().ident
_OUTCOMES = {0: Outcome.DONE, 1: Outcome.FULL, 2: Outcome.ABORTED, -1: Outcome.REJECTED}
_PARTIAL = 1
_TWO_DIMENSIONS = (8, 40)
"""The library's kinds of rotation with two dimensions besides time: M-RoPE, and the same interleaved."""
SCORE_POOLING = 4
"""The library's number for a context whose model scores pairs of texts."""
_SCRATCH = 64 << 20
"""Memory for a state in passing that is kept between calls, at most, unless another limit is set."""
_LARGER = 4
"""How many times the limit that is asked for is taken on a device, where a state needs it."""
_OPENING = 8
"""The bytes with which every state starts: a mark and the sequence."""


class CoreKeywords(TypedDict, total=False):
    """What is known of a model besides its weights and memory."""

    causal: Required[bool]
    largest_state: float
    rope: tuple[float, float]


class CachedState(NamedTuple):
    """What it takes to read captured state as numbers."""

    layout: StateLayout
    weights: LlamaWeights
    streams: int
    rope: tuple[float, float]
    """The base and the scale of the rotation of keys, 0 for those of the model."""


class LlamaCore:
    """Owns one `llama_context`, and keeps the weights it uses alive."""

    def __init__(
        self,
        weights: LlamaWeights,
        params: Any,
        memory: MemorySpec,
        *,
        causal: bool,
        largest_state: float = 0,
        rope: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """`largest_state` is about how many bytes a sequence has when it is full; `rope` are base and scale
        of the rotation of keys, 0 for those of the model."""
        self._rope = rope
        self._lib = library.load()
        self._log_sink = library.log_sink()
        self._weights = weights
        self.n_vocab = weights.n_vocab
        self.width = int(self._lib.llama_model_n_embd_out(weights.handle))
        # The abort callback is C's own strlen over this text: empty means go on. The engine asks it at
        # every node of every graph, where a callback into Python would cost more than the work.
        self._flag = ctypes.create_string_buffer(2)
        strlen = system.c_function("strlen")
        if strlen is not None:
            params.abort_callback = ctypes.cast(strlen, declarations.AbortCallback)
            params.abort_callback_data = ctypes.cast(self._flag, ctypes.c_void_p)
        with captured_errors() as reasons:
            self._context = self._lib.llama_init_from_model(weights.handle, params)
        if not self._context:
            raise OutOfMemoryError(
                f"the engine could not open a context of {params.n_ctx} cells for {params.n_seq_max} "
                f"sequences ({reasons}): try a smaller n_ctx or n_seq"
            )
        self.n_ctx_seq = int(self._lib.llama_n_ctx_seq(self._context))
        """Cells that one sequence can have, as the library counts them."""
        self._threadpool = Threadpool(self._lib, params.n_threads)
        self._threadpool.attach(self._lib, self._context)
        self._memory = self._lib.llama_get_memory(self._context)
        self.reads_on = bool(self._memory) and causal
        """Whether a text can be read in pieces: no token looks at those that follow it."""
        self._embeds = bool(params.embeddings)
        self._scores = bool(params.embeddings and params.pooling_type == SCORE_POOLING)
        self._classes = max(1, int(self._lib.llama_model_n_cls_out(weights.handle)))
        self._row = ctypes.c_float * self.n_vocab
        self._row_address = self._lib.quick("llama_get_logits_ith")
        self._pos_max = self._lib.quick("llama_memory_seq_pos_max")
        self._asynchronous = bool(weights.devices)
        # A step without rows has another graph, which is laid out in memory anew, as is the next one. Which
        # operations on experts a GPU joins depends on where they lie, and the last bits depend on that.
        self._always_gives_rows = self._asynchronous and weights.experts > 0
        self._streams = not params.kv_unified and params.n_seq_max > 1
        slides = self._lib.llama_model_n_swa(weights.handle) > 0
        self._sheds = slides and not params.swa_full and not self._streams
        # A window takes the cells of tokens that it has left behind, wherever the search starts: it keeps its
        # order by being put back.
        self._puts_back = bool(self._streams and slides)
        self._failed = False
        """Whether the last step failed."""
        self._restarts_search = bool(self._streams and not slides and self._memory and self.can_shift())
        self._n_streams = params.n_seq_max if self._streams else 1
        self._memory_spec = memory
        self._layout: StateLayout | None = None
        self._layout_known = False
        self._longest = params.n_ctx // params.n_seq_max if self._streams else params.n_ctx
        self._on_device = on_device = bool(params.offload_kqv and weights.devices)
        # A bus is fast, and states on a GPU are large: there a larger part of the memory pays.
        part = (system.physical_memory() or 0) // 32 if on_device else 0
        self._scratch_limit = max(_SCRATCH, part)
        self._largest_state = int(1.1 * largest_state) if on_device else 0
        self._native: tuple[Batch, Any] | None = None
        self._inputs: Floats | None = None
        """Hidden states that go in beside the tokens: of next-token layers alone."""
        self._vectors: dict[ControlVector, float] = {}
        self._last_table: tuple[tuple[int, int], Floats] = ((0, 0), np.empty((0, 0), np.float32))

    def decode(self, batch: Batch) -> Outcome:
        if not self.reads_on and not self._embeds:
            # The library would take it for a text to encode, and end the process where that is long.
            raise InvalidInputError("this model reads whole texts and writes none; use it for embeddings")
        bound = self._native
        native = bound[1] if bound is not None and bound[0] is batch else self._bind(batch)
        native.n_tokens = batch.size
        if self._always_gives_rows and not batch.outputs[: batch.size].any():
            batch.outputs[batch.size - 1] = 1
        if self._asynchronous and threading.get_ident() == _MAIN_THREAD:
            # The backend of a device chatters while it computes: a Ctrl-C in the midst of that is lost.
            with self._log_sink.muted(id(self)), self._threadpool:
                code = self._lib.llama_decode(self._context, native)
        else:
            with self._threadpool:
                code = self._lib.llama_decode(self._context, native)
        self._failed = code != 0
        return _OUTCOMES.get(code, Outcome.FAILED)

    @property
    def row_width(self) -> int:
        # What reads hidden states along, or traces, is bound to tokens.
        plain = type(self) is LlamaCore and self.reads_on
        return int(self._lib.llama_model_n_embd_inp(self._weights.handle)) if plain else 0

    @property
    def two_dimensions(self) -> bool:
        return int(self._lib.llama_model_rope_type(self._weights.handle)) in _TWO_DIMENSIONS

    def decode_rows(self, seq: int, positions: NDArray[np.int32], rows: Floats, *, causal: bool) -> Outcome:
        count = len(rows)
        content = np.ascontiguousarray(rows, np.float32)
        if self.two_dimensions:
            # Four a row, section after section: time, row, column, and one that nothing uses.
            sections = np.zeros((4, count), np.int32)
            sections[:3] = positions
            positions = sections
        seqs = np.full(1, seq, np.int32)
        owners = np.full(count, seqs.ctypes.data, np.uint64)
        counts, outputs = np.ones(count, np.int32), np.zeros(count, np.int8)
        if self._always_gives_rows:
            outputs[-1] = 1
        native = declarations.LlamaBatch()
        native.n_tokens = count
        assert content.shape == (count, self.row_width)
        _point(native, embd=content, pos=positions, n_seq_id=counts, seq_id=owners, logits=outputs)
        if not causal:
            self._lib.llama_set_causal_attn(self._context, False)
        try:
            with self._log_sink.muted(id(self)), self._threadpool:
                code = self._lib.llama_decode(self._context, native)
                if self._asynchronous:
                    # The arrays are read until then.
                    self.synchronize()
        finally:
            if not causal:
                self._lib.llama_set_causal_attn(self._context, True)
        self._failed = code != 0
        return _OUTCOMES.get(code, Outcome.FAILED)

    def row(self, index: int) -> Floats:
        return np.frombuffer(memoryview(self._row.from_address(self._address(index))), np.float32)

    def rows(self, indices: Sequence[int]) -> Floats:
        count, size = len(indices), 4 * self.n_vocab
        first = self._address(indices[0])
        if count > 1:
            # Rows lie in the order of the batch: if so many lie between the first and the last of rising
            # ones, nothing else does.
            rising = all(map(operator.lt, indices, indices[1:]))
            if not rising or self._address(indices[-1]) != first + (count - 1) * size:
                return np.array([self.row(index) for index in indices])
        # They mostly lie where those of the last step did, and to make an array anew takes as long as to draw
        # from it (`python -m bench.decode`).
        if self._last_table[0] != (first, count):
            memory = (ctypes.c_float * (count * self.n_vocab)).from_address(first)
            table = np.frombuffer(memoryview(memory), np.float32).reshape(count, self.n_vocab)
            self._last_table = ((first, count), table)
        return self._last_table[1]

    def _address(self, index: int) -> int:
        if self._asynchronous:
            # Waited for here, where other threads can go on: the next call keeps Python's lock.
            self.synchronize()
        address: int | None = self._row_address(self._context, index)
        if not address:
            raise EngineError(f"the engine has no logits for batch entry {index}")
        return address

    def synchronize(self) -> None:
        self._lib.llama_synchronize(self._context)

    def hidden(self, count: int) -> Floats:
        if self._scores:
            pointer = self._lib.llama_get_embeddings_seq(self._context, 0)
            if not pointer:
                raise EngineError("the engine has no score for this text")
            score = (ctypes.c_float * self._classes).from_address(ctypes.addressof(pointer.contents))
            return np.frombuffer(memoryview(score), np.float32).reshape(1, self._classes)
        pointer = self._lib.llama_get_embeddings(self._context)
        if not pointer:
            raise EngineError("the engine has no hidden states: this context was not opened for them")
        block = (ctypes.c_float * (count * self.width)).from_address(ctypes.addressof(pointer.contents))
        return np.frombuffer(memoryview(block), np.float32).reshape(count, self.width)

    def newest(self, seq: int) -> int:
        return self._pos_max(self._memory, seq)  # type: ignore[no-any-return]

    def oldest(self, seq: int) -> int:
        return int(self._lib.llama_memory_seq_pos_min(self._memory, seq))

    def remove(self, seq: int, start: int) -> None:
        self._lib.llama_memory_seq_rm(self._memory, seq, start, -1)
        if self._puts_back and self._failed and self.newest(seq) >= 0:
            # It would look for the next cell from the start, and find that of a token which has left the
            # window: before its predecessors, so that attention would sum in another order.
            self.write(seq, self.read(seq, partial=True), partial=True)
        if self._restarts_search:
            # After a step that failed, the engine may look for the next free cell behind the first one (it
            # takes back where it stood in another stream). Moving no cell at all makes it look from the
            # start: without flash attention the places of cells count.
            self._lib.llama_memory_seq_add(self._memory, seq, _BEYOND, -1, 1)

    def copy(self, src: int, dst: int) -> None:
        self._lib.llama_memory_seq_cp(self._memory, src, dst, -1, -1)
        if self._streams:
            self._flush_copy(src, dst)
        elif self._sheds and not self.write(dst, self.read(dst, partial=True), partial=True):
            # The pool of a window gives up old cells, but never one that two sequences share: each needs
            # a separate window, or the pool fills up.
            raise EngineError(f"the engine refused the window of sequence {src} for sequence {dst}")

    def _flush_copy(self, src: int, dst: int) -> None:
        """Make the engine carry out a copy between streams now.

        It puts such a copy off until the next decode, and meanwhile a read of `dst` gives old bytes and
        a write to either is lost. A batch that it must refuse, one token in two streams, makes it do what
        is pending and change nothing else.
        """
        both = (ctypes.c_int32 * 2)(src, dst)
        rows = (ctypes.POINTER(ctypes.c_int32) * 1)(ctypes.cast(both, ctypes.POINTER(ctypes.c_int32)))
        native = declarations.LlamaBatch()
        native.n_tokens = 1
        native.token = (ctypes.c_int32 * 1)(0)
        native.pos = (ctypes.c_int32 * 1)(self.newest(src) + 1)
        native.n_seq_id = (ctypes.c_int32 * 1)(2)
        native.seq_id = ctypes.cast(rows, type(native.seq_id))
        native.logits = (ctypes.c_int8 * 1)(0)
        self._add_inputs(native)
        with self._log_sink.muted(id(self)):
            outcome = self._lib.llama_decode(self._context, native)
        if _OUTCOMES.get(outcome) is not Outcome.FULL:
            raise EngineError(f"the engine did not carry out a copy between streams (code {outcome})")

    def clear(self) -> None:
        self._lib.llama_memory_clear(self._memory, True)

    def read(self, seq: int, *, partial: bool) -> NDArray[np.uint8]:
        if not partial:
            return self._read_into_scratch(seq)
        size = int(self._lib.llama_state_seq_get_size_ext(self._context, seq, _PARTIAL))
        return self._read_into(np.empty(size, np.uint8), seq, _PARTIAL)

    def write(self, seq: int, state: NDArray[np.uint8], *, partial: bool) -> bool:
        flags = _PARTIAL if partial else 0
        size = state.nbytes
        state = self._scratch.staged(state)
        with self._log_sink.muted(id(self)):
            read = self._lib.llama_state_seq_set_data_ext(
                self._context, _bytes_at(state, 0), size, seq, flags
            )
        return int(read) == size

    def adapt(self, adapters: Mapping[Adapter, float]) -> bool:
        from perdure.engine.llama.adapters import ControlVector, LlamaAdapter

        loras: dict[LlamaAdapter, float] = {}
        vectors: dict[ControlVector, float] = {}
        for adapter, scale in adapters.items():
            if not isinstance(adapter, (LlamaAdapter, ControlVector)) or adapter.weights is not self._weights:
                return False
            (loras if isinstance(adapter, LlamaAdapter) else vectors)[adapter] = scale  # type: ignore[index]
        if vectors != self._vectors:
            if self._asynchronous:
                # The step in flight reads what is about to be written.
                self.synchronize()
            if not self._steer(vectors):
                return False
        handles = (declarations.Adapter * len(loras))(*(each.handle for each in loras))
        scales = (ctypes.c_float * len(loras))(*loras.values())
        return int(self._lib.llama_set_adapters_lora(self._context, handles, len(loras), scales)) == 0

    def _steer(self, vectors: dict[ControlVector, float]) -> bool:
        """Add the sum of these control vectors to what the layers compute."""
        n_embd = int(self._lib.llama_model_n_embd(self._weights.handle))
        data, layers = None, 0
        if vectors:
            total = sum(np.float32(scale) * vector.rows for vector, scale in vectors.items())
            rows = np.ascontiguousarray(total, np.float32)
            data, layers = rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), len(rows)
        code = self._lib.llama_set_adapter_cvec(self._context, data, layers * n_embd, n_embd, 1, layers)
        if code == 0:
            self._vectors = vectors
        return int(code) == 0

    def can_shift(self) -> bool:
        return bool(self._lib.llama_memory_can_shift(self._memory))

    def capture(self, seq: int) -> Capture:
        state = self._read_into_scratch(seq)
        if not self._memory_spec.has_rows:
            return Capture(None, state.copy())
        tail_state = None
        if self._memory_spec.needs_checkpoint:
            tail_state = self.read(seq, partial=True)
        if not self._layout_known:
            # Nothing is cut before the layout has been proved on real bytes of this very context.
            tail = None if tail_state is None else tail_state[_OPENING:]
            from perdure.engine.llama.native import layout

            self._layout = layout.discover(state, tail, seq, self._n_streams)
            self._layout_known = True
        rows = self._layout.rows(state) if self._layout else None
        if rows is None:
            return Capture(None, state.copy())
        return Capture(rows, tail_state)

    def cached_state(self) -> CachedState | None:
        if self._layout is None:
            return None
        return CachedState(self._layout, self._weights, self._n_streams, self._rope)

    def assemble(
        self, seq: int, pieces: Sequence[NDArray[np.uint8]], tail_state: NDArray[np.uint8] | None
    ) -> bool:
        if not pieces:
            return tail_state is not None and self.write(seq, tail_state, partial=False)
        if not self._layout_known:
            self._prove_layout(seq)
        if self._layout is None:
            return False
        tail = None if tail_state is None else tail_state[_OPENING:]
        size = self._layout.size(sum(len(piece) for piece in pieces)) + (0 if tail is None else len(tail))
        return self.write(seq, self._layout.build(seq, pieces, tail, self._scratch.room(size)), partial=False)

    def row_bytes(self, seq: int) -> int | None:
        if not self._layout_known and self.reads_on:
            if self.newest(seq) < 0:
                self._prove_layout(seq)
            else:
                self.capture(seq)
        return self._layout.row_bytes if self._layout else None

    def prepare(self) -> None:
        if not self._layout_known and self.reads_on:
            self._prove_layout(0)
        if self._layout is not None:
            # Fresh pages can cost more than all else that it takes to put a state back.
            size = self._layout.size(self._longest)
            self._scratch.prepare(size if self._on_device else min(size, _SCRATCH))

    def _prove_layout(self, seq: int) -> None:
        """Find the layout on two tokens of our own: nothing has been captured here yet. `seq` is empty."""
        probe = Batch(2)
        probe.fill([BatchPart(seq, 0, np.zeros(2, np.int32), np.zeros(2, np.int8))])
        native, self._native = self._native, None
        if self.decode(probe) is Outcome.DONE:
            self.capture(seq)
        self.remove(seq, 0)
        self._native = native

    def _read_into_scratch(self, seq: int) -> NDArray[np.uint8]:
        size = int(self._lib.llama_state_seq_get_size_ext(self._context, seq, 0))
        return self._read_into(self._scratch.room(size), seq, 0)

    def _read_into(self, state: NDArray[np.uint8], seq: int, flags: int) -> NDArray[np.uint8]:
        size = state.nbytes
        wrote = self._lib.llama_state_seq_get_data_ext(self._context, _bytes_at(state, 0), size, seq, flags)
        if not size or wrote != size:
            raise EngineError(f"the engine gave {wrote} bytes of state for sequence {seq}, not {size}")
        return state

    @functools.cached_property
    def _scratch(self) -> Scratch:
        """Made for the first state that is on its way."""
        from perdure.engine.llama.scratch import Scratch

        device = self._weights.devices[0].handle if self._on_device else None
        return Scratch(self._lib, device, self._scratch_limit)

    def limit_scratch(self, nbytes: int) -> int:
        # A state larger than that takes fresh pages each time, which is slower than the bus by far.
        nbytes = max(nbytes, min(self._largest_state, _LARGER * nbytes))
        self._scratch_limit = nbytes
        if "_scratch" in vars(self):
            self._scratch.limit(nbytes)
        return nbytes

    @property
    def scratch_bytes(self) -> int:
        return self._scratch.nbytes if "_scratch" in vars(self) else 0

    def stop(self) -> None:
        # The library complains about being stopped. Python would hear that in the middle of native code,
        # and raise a pending KeyboardInterrupt there, where it is lost.
        self._log_sink.shut(id(self))
        self._flag[0] = b"x"

    def rearm(self) -> None:
        self._flag[0] = b"\0"
        self._log_sink.open(id(self))

    def close(self) -> None:
        if self._context:
            context, self._context = self._context, None
            self._lib.llama_free(context)
            self._threadpool.close()
            self._log_sink.open(id(self))
            self._memory = None

    def __del__(self) -> None:
        if getattr(self, "_context", None):
            self.close()

    def _bind(self, batch: Batch) -> Any:
        """The native struct over the arrays of `batch`, kept until another one comes."""
        if not self._context:
            raise ClosedError("this context is closed")
        starts = batch.seqs.ctypes.data + 4 * np.arange(batch.capacity, dtype=np.uint64)
        counts = np.ones(batch.capacity, np.int32)
        native = declarations.LlamaBatch()
        _point(
            native,
            token=batch.tokens,
            pos=batch.positions,
            n_seq_id=counts,
            seq_id=starts,
            logits=batch.outputs,
        )
        self._add_inputs(native)
        native.perdure_arrays = (starts, counts)
        self._native = (batch, native)
        return native

    def _add_inputs(self, native: Any) -> None:
        if self._inputs is not None:
            kind: Any = dict(declarations.LlamaBatch._fields_)["embd"]
            native.embd = ctypes.cast(ctypes.c_void_p(self._inputs.ctypes.data), kind)


def _point(native: Any, **arrays: NDArray[Any]) -> None:
    """Have fields of a native batch point to arrays, which must outlive it."""
    fields: dict[str, Any] = dict(declarations.LlamaBatch._fields_)
    for name, array in arrays.items():
        setattr(native, name, ctypes.cast(ctypes.c_void_p(array.ctypes.data), fields[name]))


def _bytes_at(array: NDArray[np.uint8], offset: int) -> Any:
    return ctypes.cast(array.ctypes.data + offset, ctypes.POINTER(ctypes.c_uint8))


# The CPU threads of one context, kept between steps and asleep while there is none.

_POLL = 0
"""How long a thread looks for the next step before it sleeps, from 0 to 100.

A thread that polls uses up its share of a core that another process wants, and then is not there when
the step comes: everybody waits for it at the next barrier.
"""


class Threadpool:
    """Owns one `ggml_threadpool`. Without one (none given) the library makes its threads itself.

    Always holds: it is freed once, and by `close` only, after the context that used it. Outside of a `with`
    over it the caller's thread may use the cores that it could use before.

    Where every core has a thread, each is kept on its own: they wait for each other by spinning, some
    hundred times a step, and two of them on one core (the other taken by another process) would wait for a
    turn of the scheduler each time.
    """

    def __init__(self, lib: Functions, threads: int) -> None:
        self._handle: int | None = None
        self._cores: tuple[int, ...] = ()
        cpu = lib.ggml_backend_reg_by_name(b"CPU")
        new, free = (_address(lib, cpu, name) for name in (b"ggml_threadpool_new", b"ggml_threadpool_free"))
        if threads == 1 or not new or not free:
            return
        params = ThreadpoolParams()
        lib.ggml_threadpool_params_init(byref(params), threads)
        params.poll = _POLL
        cores = system.core_ids()
        openmp = b"OPENMP = 1" in lib.llama_print_system_info()
        if threads == len(cores) and max(cores) < MAX_THREADS and not openmp:
            self._cores = cores
            params.strict_cpu = True
            for core in cores:
                params.cpumask[core] = True
        self._handle = NewThreadpool(new)(byref(params))
        self._free = FreeThreadpool(free)
        if self._cores:
            # The pool keeps its first thread, which is the caller's, on the last core from now on.
            system.use_cores(cores)

    def __enter__(self) -> None:
        """Have the caller's thread on the core that the others leave to it, during a step."""
        if self._cores:
            system.use_cores(self._cores[-1:])

    def __exit__(self, *_: object) -> None:
        if self._cores:
            system.use_cores(self._cores)

    def attach(self, lib: Functions, context: Any) -> None:
        """Have the steps of `context`, long and short, run on these threads."""
        if self._handle:
            lib.llama_attach_threadpool(context, self._handle, self._handle)

    def close(self) -> None:
        if self._handle:
            handle, self._handle = self._handle, None
            self._free(handle)


def _address(lib: Functions, backend: Any, name: bytes) -> int | None:
    address: int | None = lib.ggml_backend_reg_get_proc_address(backend, name) if backend else None
    return address
