"""What a model is, whichever engine it is of; and the calls about text that models of files share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from perdure.closing import Closing
from perdure.engine.context import Context
from perdure.engine.contract import Tokenizer
from perdure.engine_config import ContextConfig

if TYPE_CHECKING:
    from perdure.engine.core import Adapter
    from perdure.engine.embedder import Embedder


class EngineModel(Tokenizer, Protocol):
    """Weights and a vocabulary. It outlives its contexts, whatever the order of deletion."""

    @property
    def context(self) -> Callable[..., Context]:
        """Opens a context; takes `n_ctx`, `n_seq` and those options of `ContextConfig` that the engine has.
        One that was not chosen is not given; one that the engine does not have is refused."""
        ...

    @property
    def embedder(self) -> Callable[..., Embedder]:
        """Opens a context for embeddings; takes `n_ctx` and `threads`, and what else the engine knows."""
        ...

    @property
    def gpu_layers(self) -> int:
        """How many layers are on a device with separate memory."""
        ...

    @property
    def experts_on_gpu(self) -> bool:
        """Whether some of its experts are there too."""
        ...

    @property
    def traces(self) -> bool:
        """Whether its engine can trace what layers compute."""
        ...

    def adapter(self, path: str, *, layers: tuple[int, int] | None = None) -> Adapter:
        """A LoRA or a control vector for this model. A file that does not fit is refused."""
        ...

    def spare_sequences(self, n_ctx: int, config: ContextConfig) -> int:
        """How many more sequences of so many tokens the device of the cache has ample room for; 0 where the
        cache is in the machine's own memory."""
        ...

    def fit_context(self, n_ctx: int | None, slots: int | None, config: ContextConfig) -> tuple[int, int]:
        """Tokens of a request and requests at once that fit into what is free. None is for it to choose."""
        ...

    def close(self) -> None: ...


class FileTokenizer(Protocol):
    """The vocabulary of a file."""

    @property
    def ends(self) -> frozenset[int]: ...
    @property
    def controls(self) -> frozenset[int]: ...
    def tokenize(self, text: str, *, special: bool, bos: bool) -> list[int]: ...
    def detokenize(self, tokens: Iterable[int], *, special: bool) -> str: ...
    def piece(self, token: int, *, special: bool) -> bytes: ...
    def check(self, token: int) -> int:
        """`token`, if it is one of the vocabulary."""
        ...


class FileModel(Closing):
    """A model whose text is read and written by the tokenizer of its file, in the machine's memory."""

    @property
    def gpu_layers(self) -> int:
        return 0

    @property
    def experts_on_gpu(self) -> bool:
        return False

    @property
    def traces(self) -> bool:
        return False

    def _tokenizer(self) -> FileTokenizer:
        """Raises after `close`."""
        raise NotImplementedError

    def tokenize(self, text: str, *, special: bool = False, bos: bool = True) -> list[int]:
        """`text` as token ids.

        `bos` adds the marks around the text that the model's file asks for, and none where it asks for
        none; `special` reads the likes of `<|im_end|>` as the tokens they name.
        """
        return self._tokenizer().tokenize(text, special=special, bos=bos)

    def detokenize(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """The text of `tokens`; `special` writes control tokens out."""
        return self._tokenizer().detokenize(tokens, special=special)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token, which may be a part of a character."""
        return self._tokenizer().piece(token, special=special)

    def is_end(self, token: int) -> bool:
        """Whether the model says with `token` that it is done."""
        tokenizer = self._tokenizer()
        return tokenizer.check(token) in tokenizer.ends

    def is_control(self, token: int) -> bool:
        """Whether `token` is a mark for the model, never text."""
        tokenizer = self._tokenizer()
        return tokenizer.check(token) in tokenizer.controls

    @property
    def ends(self) -> frozenset[int]:
        """The tokens with which the model says that it is done."""
        return self._tokenizer().ends

    @property
    def controls(self) -> frozenset[int]:
        """The tokens that are marks for the model, never text."""
        return self._tokenizer().controls
