"""Opens what guesses for a context: n-grams always, the model's own layers or its assistant where the context
has them, and a draft model where one was chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from perdure import Context, InvalidInputError
from perdure.ext.speculation.draft_model import NextTokenLayers, assistant_of, open_draft_model
from perdure.ext.speculation.guess_source import GuessSource
from perdure.ext.speculation.ngrams import Ngrams
from perdure.ext.speculation.speculator import Speculator
from perdure.spi.base import EngineConfig
from perdure.spi.engine import EngineModel


class Opener:
    """The `DrafterOpener` of this extension."""

    @contextmanager
    def context_options(self, model: EngineModel, config: EngineConfig) -> Iterator[Mapping[str, Any]]:
        draft = config.extended.get("draft")
        if config.exact and (draft is not None or config.extended.get("mtp")):
            raise InvalidInputError("an exact runtime does not guess ahead: leave draft or exact out")
        assistant = None if draft is None else assistant_of(draft, model)
        try:
            yield {} if assistant is None else {"assistant": assistant}
        finally:
            if assistant is not None and assistant is not draft:
                # The context keeps what it needs of it.
                assistant.close()

    def open(self, model: EngineModel, context: Context, config: EngineConfig) -> Speculator:
        draft = config.extended.get("draft")
        sources: list[GuessSource] = [Ngrams()]
        if context.capabilities.guesses:
            sources.append(NextTokenLayers(context))
        elif draft is not None:
            sources.append(open_draft_model(draft, model, context, config.threads))
        return Speculator(sources, prepares=context.capabilities.asynchronous)


OPENER = Opener()
