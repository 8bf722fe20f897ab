"""`perdure analyse` and `vectors`: what a model did with a text, as one HTML page, and control vectors."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from perdure import InvalidInputError, SessionNotFoundError, StoreError
from perdure.spi.base import EngineConfig, atomic_write
from perdure.spi.cli import opened, session_folder, sessions_in, shared, terminal, working


def analyse(
    what: Annotated[
        str,
        typer.Argument(
            metavar="SESSION|PROMPT",
            autocompletion=shared.session_names,
            help="A session, as `perdure sessions ls` shows it; or a text, if there is none of that name.",
        ),
    ],
    model: shared.Model = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The HTML file to write.")
    ] = Path("analysis.html"),
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", min=0, help="Tokens to generate after the text.")
    ] = 32,
    raw: Annotated[bool, typer.Option("--raw", help="Analyse raw text, without the chat template.")] = False,
    store: shared.StoreFolder = None,
) -> None:
    """Write a page on what a model did. It has surprise, attention, keys and values; it needs no network."""
    from perdure import Message, Model
    from perdure.ext.inspection.analysis import analyse as analyse_text
    from perdure.ext.inspection.page import page_of

    tokens, folder = _session(what, store)
    # Closed also where it is refused: MLX's threads do not survive the end of Python.
    with closing(terminal.load(model)) as loaded:
        if not isinstance(loaded, Model):
            raise InvalidInputError("only models on llama.cpp can be analysed")
        room = max(512, len(tokens or ()) + max_tokens + 1)
        config = EngineConfig(n_ctx=room if tokens is None else None, slots=1)
        with opened(model, config, store=folder, model=loaded) as runtime:
            if tokens is None:
                messages = [Message(role="user", content=what)]
                prompt = None if raw else runtime.chat_format.prompt(messages)
                tokens = loaded.tokenize(what) if prompt is None else list(prompt.transcript.tokens)
            analysis = analyse_text(runtime, loaded, tokens, title=what[:200], max_tokens=max_tokens)
    with atomic_write(output) as file:
        file.write(page_of(analysis).encode())
    for note in analysis.notes:
        terminal.note(note)
    terminal.tell(f"Wrote {output}.")


def _session(name: str, store: Path | None) -> tuple[list[int] | None, Path | None]:
    """The tokens of a session and the folder of its store; None and None where there is no such session."""
    try:
        with sessions_in(store, readonly=True) as sessions:
            return list(sessions.open(name, create=False).tokens), session_folder(store)
    except (SessionNotFoundError, StoreError):
        if store is not None:
            raise
        return None, None


def vectors(
    pairs: Annotated[
        Path,
        typer.Argument(
            metavar="PAIRS", help='A file of lines such as "positive": "I am glad", "negative": "I am sad".'
        ),
    ],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The control vector to write, a .gguf file.")],
    model: shared.Model = None,
    method: Annotated[
        str, typer.Option("--method", metavar="METHOD", help="mean: the average difference; or pca.")
    ] = "mean",
) -> None:
    """Make a control vector from contrast pairs. Use it with --control-vector, or as an adapter."""
    from typing import cast

    from perdure import Model
    from perdure.ext.inspection.vectors import Method, directions, read_pairs, write_vector

    examples = read_pairs(pairs)
    with closing(terminal.load(model)) as loaded:
        if not isinstance(loaded, Model):
            raise InvalidInputError("control vectors are made with models on llama.cpp")
        with working("Reading pairs") as progress:
            rows = directions(loaded, examples, method=cast(Method, method), progress=progress)
        write_vector(output, rows, loaded.info.architecture)
    terminal.tell(f"Wrote {output}: {len(rows)} layers, from {len(examples)} pairs.")
