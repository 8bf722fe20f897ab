"""Writes what editors read of the engine's options, from `perdure.engine_config`: the typed keywords of
src/perdure/engine_config/keywords.py, and the list in the docstring of `perdure.open`.

`make api` runs it; a test compares both with what it would write.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path

from perdure.engine_config import (
    ContextConfig,
    EngineConfig,
    LoadingConfig,
    engine_options,
    extended_options,
)
from perdure.extension import extensions, imported
from perdure.options import options_of

SOURCE = Path(__file__).resolve().parents[1] / "src" / "perdure"
KEYWORDS = SOURCE / "engine_config" / "keywords.py"
OPENING = SOURCE / "opening.py"
MARKS = "    Of the engine:\n\n", '    """\n'
"""What the list in the docstring stands between."""
HEAD = '''"""Keywords of the engine's options with their types, written by `tools/engine_keywords.py`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypedDict


class LoadedModel(Protocol):
    """A model that is loaded already, of any engine."""

    @property
    def digest(self) -> str: ...
'''


def keywords() -> str:
    """src/perdure/engine_config/keywords.py."""
    opened = engine_options()
    return HEAD + "".join(
        (
            "\n\nEXTENDED = {\n",
            *(f'    "{name}": "{extension}",\n' for name, extension in _extended().items()),
            '}\n"""Options of extensions that come with perdure, and whose they are."""\n',
            _keywords("LoadingKeywords", "How a model is loaded: of `Model`.", _all(LoadingConfig)),
            _keywords(
                "ContextKeywords",
                "What a context has, besides how many sequences of how many tokens: of `Model.context`.",
                _all(ContextConfig),
            ),
            _keywords("EngineKeywords", "What a model is opened with: of `perdure.open`.", opened),
            _keywords(
                "FitKeywords",
                "What you choose of how a model is opened, as far as its memory depends on it.",
                [name for name, each in opened.items() if each.affects_memory],
            ),
            _keywords(
                "FitOptions",
                "What a proposal chose, as keywords of `perdure.open`.",
                ("n_ctx", "slots", "k_type", "v_type", "gpu_layers", "cpu_experts"),
            ),
        )
    )


def _extended() -> dict[str, str]:
    """Options of our extensions, by their names: the extension."""
    ours = [each for each in extensions().values() if (SOURCE / "ext" / each.name).is_dir()]
    options = {
        name: each.name for each in ours for kind in each.options for name in options_of(imported(kind))
    }
    return {name: extension for name, extension in options.items() if name in extended_options()}


def _all(kind: type[LoadingConfig | ContextConfig]) -> list[str]:
    """The options of a call: the kernel's, and those of extensions."""
    extended = [name for name, each in extended_options().items() if kind.CALL in each.calls]
    return [*options_of(kind), *extended]


def _keywords(title: str, about: str, names: Iterable[str]) -> str:
    extended = [imported(kind) for each in extensions().values() for kind in each.options]
    kinds = [*extended, *reversed(EngineConfig.__mro__)]
    notes = {name: note for each in kinds for name, note in _notes(each).items()}
    lines = "".join(f"    {name}: {notes[name]}\n" for name in names).replace("'", '"')
    return f'\n\nclass {title}(TypedDict, total=False):\n    """{about}"""\n\n{lines}'


def _notes(kind: type) -> dict[str, str]:
    return dict(vars(kind).get("__annotations__", {}))


def opening() -> str:
    """src/perdure/opening.py with the list of options."""
    text = OPENING.read_text(encoding="utf-8")
    before, mark, rest = text.partition(MARKS[0])
    assert mark, f"{OPENING} has no list of options"
    lines = []
    for each in engine_options().values():
        line = f"- `{each.name}`: {each.help} (default: {each.default_text})."
        lines += textwrap.wrap(line, 110, initial_indent="    ", subsequent_indent="      ")
    return f"{before}{mark}" + "\n".join(lines) + f"\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"


if __name__ == "__main__":
    KEYWORDS.write_text(keywords(), encoding="utf-8")
    OPENING.write_text(opening(), encoding="utf-8")
