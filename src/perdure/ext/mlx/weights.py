"""A model class of mlx-lm with its weights. One computation at a time, from any thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm import utils

from perdure import MemorySpec, ModelLoadError, OutOfMemoryError, PerdureError
from perdure.ext.mlx.adapters import MlxAdapter, put_on
from perdure.ext.mlx.caches import RowCache, leaves, made_for
from perdure.ext.mlx.folder import Folder
from perdure.ext.mlx.sequence_state import kind_of


class Computed(NamedTuple):
    """What one call of the model gives, not computed yet."""

    logits: Any
    """(sequences, rows that were selected, vocabulary)."""
    hidden: Any
    """(sequences, tokens, width); None where the class does not show it."""


class MlxWeights:
    """The model class of a folder, loaded. It runs under `lock`, so that several contexts can share it."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        self._select: list[int] | None = None
        self._hidden: Any = None
        self._adapters: tuple[tuple[MlxAdapter, float], ...] = ()
        self._adapted: list[str] = []
        """The layers that are changed by them."""
        try:
            self.model, self.config = utils.load_model(folder.path, lazy=False, strict=True)
        except (MemoryError, RuntimeError) as error:
            if "alloc" in str(error).lower() or isinstance(error, MemoryError):
                raise OutOfMemoryError(
                    f"{folder.path.name} has {folder.nbytes} bytes of weights, which do not fit: {error}"
                ) from None
            raise _refused(folder, error) from None
        except PerdureError:
            raise
        except Exception as error:  # Whatever a model class makes of a config that is not its own.
            raise _refused(folder, error) from None
        hooked = self._hook()
        self._probe()
        self.shows_hidden = hooked and self.width > 0
        """Whether the class shows what is below its vocabulary."""

    def _probe(self) -> None:
        """What a step of one token shows: the size of the vocabulary, and of what is kept."""
        caches = made_for(self.model)
        try:
            output = self.run(mx.array([[0]]), caches, None)
            arrays = [part for leaf in leaves(caches) for part in leaf.state_arrays()]
            mx.eval(output.logits, *arrays)
        except Exception as error:  # As above: the class's own.
            raise _refused(self.folder, error) from None
        self.n_vocab = int(output.logits.shape[-1])
        self.width = 0 if output.hidden is None else int(output.hidden.shape[-1])
        rows = [leaf for leaf in leaves(caches) if isinstance(leaf, RowCache)]
        self.widths = frozenset(int(part.shape[3]) for leaf in rows for part in leaf.parts)
        """Numbers of a row of one head."""
        self.row_bytes = sum(
            part.shape[1] * part.shape[3] * part.itemsize for leaf in rows for part in leaf.parts
        )
        """Bytes that a token adds."""

    def memory(self) -> MemorySpec:
        """The kind of memory, from the caches that the class asks for."""
        return kind_of(made_for(self.model))

    def _hook(self) -> bool:
        """Have the part below the vocabulary give only the rows that are wanted, and show its hidden states.

        All of mlx-lm's classes compute logits for every token. With 150,000 tokens in a vocabulary, that is
        more than all the rest of a prompt.
        """
        place = self.model
        while (inner := getattr(place, "language_model", None)) is not None:
            place = inner
        for name in ("model", "backbone", "transformer"):
            body = getattr(place, name, None)
            if body is not None and hasattr(body, "layers") and callable(body):
                break
        else:
            return False
        weights, base = self, type(body)

        class Selecting(base):  # type: ignore[misc, valid-type]
            def __call__(self, *positional: Any, **named: Any) -> Any:
                hidden = super().__call__(*positional, **named)
                if not hasattr(hidden, "ndim") or hidden.ndim != 3:
                    return hidden
                weights._hidden = hidden
                if weights._select is None or len(weights._select) == hidden.shape[1]:
                    return hidden
                return hidden[:, mx.array(weights._select)]

        Selecting.__name__ = base.__name__
        body.__class__ = Selecting
        return True

    def use(self, adapters: tuple[tuple[MlxAdapter, float], ...]) -> None:
        """Compute with these from now on."""
        if adapters != self._adapters:
            self._adapted = put_on(self.model, adapters, self._adapted)
            self._adapters = adapters

    def run(self, tokens: Any, caches: Sequence[Any], select: list[int] | None) -> Computed:
        """What the model makes of `tokens` (sequences, tokens) behind what is in `caches`.

        `select` names the rows that logits are wanted of; None is all.
        """
        self._select, self._hidden = select, None
        try:
            logits = self.model(tokens, cache=caches)
            hidden = self._hidden
        finally:
            self._select = self._hidden = None
        if select is not None and logits.shape[1] != len(select):
            logits = logits[:, mx.array(select)]
        return Computed(logits, hidden)


def skeleton(folder: Folder) -> MemorySpec:
    """The kind of memory of a folder's model class, without its weights."""
    try:
        made, arguments = utils._get_classes(dict(folder.config))
        kind = kind_of(made_for(made(arguments.from_dict(dict(folder.config)))))
    except PerdureError:
        raise
    except Exception as error:  # As where it is loaded.
        raise _refused(folder, error) from None
    return kind


def _refused(folder: Folder, error: BaseException) -> ModelLoadError:
    lines = str(error).strip().splitlines()
    return ModelLoadError(
        f"mlx-lm refused {folder.path.name} ({folder.config.get('model_type')}): "
        f"{type(error).__name__}: {lines[0][:300] if lines else 'no reason given'}"
    )
