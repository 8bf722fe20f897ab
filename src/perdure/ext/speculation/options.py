"""What guesses: options of `perdure.open`, `Model` and `Model.context`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perdure.spi.base import LoadedModel, option

NEXT_TOKEN = "mtp"
"""What `draft` is for a model's own next-token layers."""


def _resolved(draft: Any) -> Mapping[str, Any]:
    """The model's own layers are an option of loading and of the context; a file is found from any folder."""
    if draft == NEXT_TOKEN:
        return {"mtp": True}
    if isinstance(draft, (str, os.PathLike)):
        file = Path(draft)
        draft = str(file.absolute()) if file.exists() else os.fspath(draft)
    return {"draft": draft}


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions:
    """Options of this extension."""

    draft: str | os.PathLike[str] | LoadedModel | None = option(
        None,
        checked=False,
        what="a model of the same vocabulary, the model's assistant, or mtp",
        help="guesses ahead for replies with speculate: a smaller model, its assistant (Gemma 4), or mtp",
        metavar="MODEL|mtp",
        surfaces=("chat", "run", "serve"),
        affects_reply=False,
        resolve=_resolved,
    )
    mtp: bool | None = option(
        None,
        usual=False,
        help="load the model's next-token layers, and guess by them",
        surfaces=(),
        calls=("Model", "Model.context"),
    )
    assistant: LoadedModel | None = option(
        None,
        checked=False,
        what="the model's assistant, loaded",
        help="a drafter that guesses from the model's hidden states",
        surfaces=(),
        calls=("Model.context",),
    )
