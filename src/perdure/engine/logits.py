"""Logits as views of one step.

A view reads the engine's own memory, which the next step overwrites and may move. So a view belongs
to a `Step`, every access asks the step first, and no array over that memory gets out except inside
`borrow()`, which pins the step until the last array over it is gone.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar, overload

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from perdure.engine.contract import Candidate, Floats, Step, log_norm, token_array
from perdure.engine.row_kernels import top_k
from perdure.errors import InvalidInputError, PinnedError, StaleViewError

T = TypeVar("T")

_READ_ONLY = "logits are read-only; change a copy: view.copy()"


class _Lease:
    """What a borrowed array stands on: it keeps the owner of the memory alive."""

    def __init__(self, row: Floats, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = row.__array_interface__


class LogitsView(NDArrayOperatorsMixin):
    """One row of logits: read-only, without a copy, and refused once its step is over.

    Arithmetic and NumPy functions read the live memory and return arrays of their own.
    """

    __slots__ = ("__weakref__", "_live", "_norm", "_row", "_step")
    __array_priority__ = 100.0

    dtype = np.dtype(np.float32)
    ndim = 1

    def __init__(self, row: Floats, step: Step) -> None:
        self._live = row
        self._row = row.view()
        self._row.flags.writeable = False
        self._step = step
        self._norm: float | None = None

    # Access: everything below goes through _read, which holds the context's lock.

    def _read(self, use: Callable[[Floats], T]) -> T:
        step = self._step
        if step.alive:
            with step.lock:
                if step.alive:
                    return use(self._row)
        raise StaleViewError(
            "these logits belong to a step that is over: the context has changed since. "
            "Take ctx.logits() again after each decode, or keep view.copy()"
        )

    def _own(self, result: Any) -> Any:
        """`result` with anything that lies over engine memory replaced by a copy."""
        if isinstance(result, np.ndarray):
            # An empty slice shares nothing, but the row is still its base.
            return result.copy() if not result.size or np.may_share_memory(result, self._row) else result
        if isinstance(result, LogitsView):
            return result.copy()
        if isinstance(result, tuple) and hasattr(result, "_fields"):
            return type(result)(*(self._own(item) for item in result))
        if isinstance(result, (tuple, list)):
            return type(result)(self._own(item) for item in result)
        return result

    @property
    def size(self) -> int:
        return len(self._row)

    @property
    def shape(self) -> tuple[int]:
        return (len(self._row),)

    @property
    def stale(self) -> bool:
        """Whether the step is over, so that every access would raise."""
        return not self._step.alive

    def __len__(self) -> int:
        return self._read(len)

    @overload
    def __getitem__(self, index: int) -> np.float32: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int] | np.ndarray[Any, Any]) -> Floats: ...
    def __getitem__(self, index: Any) -> Any:
        return self._read(lambda row: self._own(row[index]))

    def __setitem__(self, index: object, value: object) -> None:
        raise ValueError(_READ_ONLY)

    def __iter__(self) -> Iterator[np.float32]:
        for index in range(len(self)):
            yield self[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError("logits cannot be read without a copy; use view.borrow()")
        return self._read(lambda row: np.array(row, dtype=dtype, copy=True))

    def __reduce__(self) -> Any:
        # Pickling and the copy module make an array: a view means nothing away from its step.
        return self.copy().__reduce__()

    def copy(self) -> Floats:
        """The row as a new array."""
        return self._read(lambda row: row.copy())

    def tolist(self) -> list[float]:
        return self._read(lambda row: row.tolist())

    def __repr__(self) -> str:
        if self.stale:
            return f"<LogitsView of {self.size} tokens, stale>"
        best = self.argmax()
        return f"<LogitsView of {self.size} tokens, argmax {best}>"

    # NumPy's protocols.

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        # NumPy's protocol: the keywords are those of any of its functions.
        if method == "at" and isinstance(inputs[0], LogitsView):
            # NumPy does not ask whether it may write here.
            raise ValueError(_READ_ONLY)
        return self._call(getattr(ufunc, method), inputs, kwargs)

    def __array_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self._call(func, args, kwargs)

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        views: list[LogitsView] = []
        private = _collect((args, kwargs), views)
        # Refused at once, without waiting for a decode in flight to give the lock back.
        for view in views:
            if view.stale:
                view._read(len)
        with ExitStack() as stack:
            # One order for all threads, so that two views of two contexts cannot deadlock.
            for step in sorted({view._step for view in views}, key=id):
                stack.enter_context(step.lock)
            for view in views:
                view._read(len)
            result = func(*_bare(args, private), **_bare(kwargs, private))
            for view in views:
                result = view._own(result)
            return result

    # What people ask of logits.

    def argmax(self) -> int:
        """The likeliest token."""
        # NumPy's argmax copies an array that it may not write to.
        return int(self._read(lambda _: self._live.argmax()))

    def max(self) -> np.float32:
        return self._read(lambda row: row.max())

    def min(self) -> np.float32:
        return self._read(lambda row: row.min())

    def top(self, k: int) -> list[Candidate]:
        """The `k` likeliest tokens, best first; of equals, the lower id."""
        if not 1 <= k <= self.size:
            raise InvalidInputError(f"top(k) takes 1 to {self.size}, got {k}")
        return self._read(lambda row: self._top(row, k))

    def logprobs(self, tokens: Sequence[int] | np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The natural log probabilities of `tokens`."""
        ids = np.asarray(tokens).reshape(-1)
        ids = token_array(ids, self.size) if ids.size else ids.astype(np.int32)
        return self._read(lambda row: row[ids].astype(np.float64) - self._log_norm(row))

    def log_softmax(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The natural log probabilities of all tokens, as a new array."""
        return self._read(lambda row: row.astype(np.float64) - self._log_norm(row))

    def log_norm(self) -> float:
        """What to subtract from a logit for its natural log probability."""
        return self._read(self._log_norm)

    def surprisal(self, token: int) -> float:
        """How unexpected `token` is, in nats."""
        return -float(self.logprobs([token])[0])

    def entropy(self) -> float:
        """The uncertainty of the next token, in nats."""

        def compute(row: Floats) -> float:
            logp = row.astype(np.float64) - self._log_norm(row)
            p = np.exp(logp)
            # A masked token has p = 0 and logp = -inf, and adds nothing.
            return float(-np.sum(p * np.where(p > 0, logp, 0.0)))

        return self._read(compute)

    def _log_norm(self, row: Floats) -> float:
        if self._norm is None:
            self._norm = log_norm(row)
        return self._norm

    def _top(self, row: Floats, k: int) -> list[Candidate]:
        ids, values = top_k(row[None], k)
        norm = self._log_norm(row)
        return [
            Candidate(token, logit, logit - norm)
            for token, logit in zip(ids[0].tolist(), values[0].tolist(), strict=True)
        ]

    @contextmanager
    def borrow(self) -> Iterator[Floats]:
        """A real ndarray over the engine's memory, for the length of a `with` block.

        While it is open, calls that would move the memory raise `PinnedError`. An array that outlives
        the block makes leaving it raise, and keeps the step pinned until it is gone.
        """

        def pin(row: Floats) -> Floats:
            root: Floats = np.asarray(_Lease(row, self._step.keep))
            root.flags.writeable = False
            self._step.pins.append(weakref.ref(root))
            return root

        root = self._read(pin)
        root_references = sys.getrefcount(root)
        # Slices of `borrowed` stand on `root`, so `root` outlives them all.
        borrowed = root[:]
        own_references = sys.getrefcount(borrowed)
        try:
            yield borrowed
        except BaseException:
            _release(borrowed, own_references)
            raise
        # The one more is the caller's name for it.
        if not _release(borrowed, own_references) or sys.getrefcount(root) > root_references:
            del root, borrowed
            raise PinnedError(
                "an array from borrow() outlives its block: copy what you keep. "
                "The context stays pinned until that array is gone"
            )


def _release(borrowed: Floats, references: int) -> bool:
    """Empty `borrowed`, which the caller's name outlives the block with, unless something else has it."""
    # Here the argument is one more reference, and the caller's name another.
    if sys.getrefcount(borrowed) > references + 2:
        return False
    nothing: Any = (1, (0,), np.dtype(np.float32), False, b"")
    borrowed.__setstate__(nothing)
    return True


_VALUES = frozenset({bool, int, float, complex, str, bytes, slice, type(None), type(...)})


def _collect(value: Any, into: list[LogitsView]) -> bool:
    """Gather the views in `value`; whether all else in it is known not to keep the arrays it meets.

    A callback, an array subclass or another library's array is handed its neighbours by NumPy.
    """
    kind = type(value)
    if isinstance(value, LogitsView):
        into.append(value)
        return True
    if kind in (tuple, list, dict):
        harmless = True
        for item in value.values() if kind is dict else value:
            harmless = _collect(item, into) and harmless
        return harmless
    if isinstance(value, type):
        return value in _VALUES or issubclass(value, np.generic)
    return kind is np.ndarray or kind in _VALUES or isinstance(value, (np.generic, np.dtype))


def _bare(value: Any, private: bool) -> Any:
    """`value` with each view replaced by its array: the live one only where nobody could keep it."""
    if isinstance(value, LogitsView):
        return value._row if private else value._row.copy()
    if type(value) in (tuple, list):
        return type(value)(_bare(item, private) for item in value)
    if type(value) is dict:
        return {key: _bare(item, private) for key, item in value.items()}
    return value
