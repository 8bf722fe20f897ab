"""Every error that perdure raises on purpose.

PerdureError
├── InvalidInputError        a bad argument; nothing was changed
│   ├── TokenError               a token id outside the vocabulary, or no tokens at all
│   ├── SequenceError            a sequence number the context does not have
│   ├── RowError                 a row of logits that the last step did not produce
│   ├── SamplingError            a sampler setting out of its range
│   ├── GrammarError             a schema, regex or grammar that does not compile
│   └── TemplateError            a chat template that is missing, broken, or refuses the messages
├── ContextOverflow          more tokens than fit (.needed, .fits, .at_least)
├── CannotRewindError        this kind of memory cannot go back that far (.asked, .reachable)
├── StaleViewError           a view of a step that is over
├── PinnedError              engine memory is borrowed; also a BufferError
├── ClosedError              used after close
├── TooLargeError            something from outside is larger than may be read (.limit); also a ValueError
├── UnsupportedSystemError   this operating system cannot do it
├── BusyError                refused because of load (.waiting, .limit)
├── EngineError              the engine failed
│   ├── EngineLibraryError       no llama.cpp library that can be used here (.tried)
│   │   └── LibraryFetchError        … and none could be fetched or installed
│   ├── ModelLoadError           the engine refused the file
│   ├── OutOfMemoryError         the engine could not get the memory it asked for
│   ├── EngineDiedError          the engine's process ended (.signal, .code, .kept)
│   └── DecodeError              a decode failed (.kept says what each sequence still holds)
│       └── DecodeCancelled          … because a caller cancelled it
├── StateError               saved state that cannot be used; nothing was changed
│   ├── CorruptStateError        damaged or truncated bytes
│   └── IncompatibleStateError   whole, but of another model, build or layout (.field)
├── StoreError               a store folder could not be used; what it holds is untouched
│   ├── StoreLockedError         another process writes to it
│   ├── StoreReadOnlyError       it may only be read
│   ├── StoreFullError           the disk, or the budget, has no room (.needed)
│   │   └── QuotaError               a key has stored as much as it may (.limit)
│   ├── StoreVersionError        it was made by a newer perdure (.found, .known)
│   ├── StoreKeyError            its blocks are encrypted, and the key is missing or another
│   └── StoreDamagedError        its index cannot be read; verify() rebuilds it
├── SessionError             a session could not be used; nothing was changed
│   ├── SessionNotFoundError     there is none of that name, or no such memory
│   ├── SessionExistsError       there is one of that name already
│   ├── SessionBusyError         it is answering another turn
│   ├── TurnKeptError            this request is one of its turns already (.turn)
│   └── AmbiguousError           several would do; name one (.found)
└── ModelError               a model could not be found or fetched
    ├── ModelNotFoundError       no such name or file
    ├── ModelFileError           the file is not a whole GGUF model
    │   └── DeadlyFileError          … or ended the process that loaded it before
    └── FetchError               the download failed (what was fetched is kept for the next try)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class PerdureError(Exception):
    """The root of everything perdure raises on purpose. Any of them can be sent to another process."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Python would call the class with the message alone, which is too little for some of them.
        return _revived, (type(self), self.args, self.__dict__)


class InvalidInputError(PerdureError, ValueError):
    """A bad argument. Nothing was changed."""


class TokenError(InvalidInputError):
    """A token id outside the vocabulary, or no tokens where some are needed."""


class SequenceError(InvalidInputError):
    """A sequence number that the context does not have."""


class RowError(InvalidInputError):
    """A row of logits that the last step did not produce."""


class SamplingError(InvalidInputError):
    """A sampler setting out of its range."""


class GrammarError(InvalidInputError):
    """A schema, regex or grammar that does not compile."""


class TemplateError(InvalidInputError):
    """A chat template that is missing, does not compile, refuses the messages, or asks for too much."""


class ContextOverflow(PerdureError):
    """More tokens than fit. Nothing was decoded.

    With `at_least`, `needed` is a lower bound: a text that surely does not fit is not tokenised.
    """

    def __init__(self, message: str, *, needed: int, fits: int, at_least: bool = False) -> None:
        super().__init__(message)
        self.needed = needed
        self.fits = fits
        self.at_least = at_least


class CannotRewindError(PerdureError):
    """The memory cannot go back to the length that was asked for. Nothing was changed."""

    def __init__(self, message: str, *, asked: int, reachable: int) -> None:
        super().__init__(message)
        self.asked = asked
        self.reachable = reachable


class StaleViewError(PerdureError):
    """A view of logits whose step is over."""


class PinnedError(PerdureError, BufferError):
    """Engine memory is borrowed, so nothing may move it. Nothing was changed."""


class ClosedError(PerdureError):
    """Use after close."""


class TooLargeError(PerdureError, ValueError):
    """Something from outside is larger than is ever read of it. It was not read, and nothing was changed."""

    def __init__(self, message: str, *, limit: int) -> None:
        super().__init__(message)
        self.limit = limit


class UnsupportedSystemError(PerdureError):
    """This operating system cannot do what was asked for. Nothing was changed."""


class BusyError(PerdureError):
    """Refused because of load; try again later."""

    def __init__(self, message: str, *, waiting: int, limit: int) -> None:
        super().__init__(message)
        self.waiting = waiting
        self.limit = limit


class EngineError(PerdureError):
    """The engine failed."""


class EngineLibraryError(EngineError):
    """There is no llama.cpp library that can be used here. `tried` says what was looked at, and why not."""

    def __init__(self, message: str, *, tried: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.tried = tuple(tried)


class LibraryFetchError(EngineLibraryError):
    """A llama.cpp library could not be fetched or installed. What was installed before is as it was."""


class ModelLoadError(EngineError):
    """The engine refused the model file."""


class OutOfMemoryError(EngineError):
    """The engine could not get the memory it asked for."""


class EngineDiedError(EngineError):
    """The engine's process ended, by a signal or with an exit code. `kept` is the tokens that had come."""

    def __init__(
        self, message: str, *, signal: str | None = None, code: int | None = None, kept: int = 0
    ) -> None:
        super().__init__(message)
        self.signal = signal
        self.code = code
        self.kept = kept


class DecodeError(EngineError):
    """A decode failed. `kept` maps the sequences that it touched to the tokens they still hold."""

    def __init__(self, message: str, *, kept: Mapping[int, int]) -> None:
        super().__init__(message)
        self.kept = dict(kept)


class DecodeCancelled(DecodeError):
    """A decode was stopped on request."""


class StateError(PerdureError):
    """Saved state that cannot be used. Nothing was changed."""


class CorruptStateError(StateError):
    """The bytes are damaged, truncated, or not a saved state at all."""


class IncompatibleStateError(StateError):
    """The bytes are whole, but belong to another model, build or layout."""

    def __init__(self, message: str, *, field: str = "identity") -> None:
        super().__init__(message)
        self.field = field


class StoreError(PerdureError):
    """A store folder could not be used. What it holds is untouched."""


class StoreLockedError(StoreError):
    """Another process writes to this store."""


class StoreReadOnlyError(StoreError):
    """This store may only be read."""


class StoreFullError(StoreError):
    """The disk, or the store's budget, has no room."""

    def __init__(self, message: str, *, needed: int) -> None:
        super().__init__(message)
        self.needed = needed


class QuotaError(StoreFullError):
    """A namespace has stored as much as it may."""

    def __init__(self, message: str, *, needed: int, limit: int) -> None:
        super().__init__(message, needed=needed)
        self.limit = limit


class StoreVersionError(StoreError):
    """The store was made by a newer perdure."""

    def __init__(self, message: str, *, found: int, known: int) -> None:
        super().__init__(message)
        self.found = found
        self.known = known


class StoreKeyError(StoreError):
    """The blocks of the store are encrypted, and their key is missing, unreadable or another one."""


class StoreDamagedError(StoreError):
    """The index of the store cannot be read."""


class SessionError(PerdureError):
    """A session could not be used. Nothing was changed."""


class SessionNotFoundError(SessionError):
    """There is no session of that name, or no memory at that address."""


class SessionExistsError(SessionError):
    """There is a session of that name already."""


class SessionBusyError(SessionError):
    """The session is answering another turn."""


class TurnKeptError(SessionError):
    """A request that was sent again is a turn of the session already: its idempotency key says so."""

    def __init__(self, message: str, *, turn: int) -> None:
        super().__init__(message)
        self.turn = turn
        """Its number, from 1."""


class AmbiguousError(SessionError):
    """Several would do: one must be named."""

    def __init__(self, message: str, *, found: Sequence[str]) -> None:
        super().__init__(message)
        self.found = tuple(found)


class ModelError(PerdureError):
    """A model could not be found, fetched or read."""


class ModelNotFoundError(ModelError):
    """No such model name or file."""


class ModelFileError(ModelError):
    """The file is not a whole GGUF model."""


class DeadlyFileError(ModelFileError):
    """The file ended the process that loaded it before, and is not loaded the same way again."""


class FetchError(ModelError):
    """The download failed. What was fetched is kept for the next try."""


def _revived(kind: type[PerdureError], args: tuple[Any, ...], state: dict[str, Any]) -> PerdureError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error
