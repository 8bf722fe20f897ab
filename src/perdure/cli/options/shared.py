"""Options that several commands share, each with one name, one meaning and its default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from perdure.cli.options.completion import first_word, model_names, session_names
from perdure.options import Option

_Talk = "The conversation"
_Engine = "Engine"
_Sampling = "Sampling"
_Further = "Further sampling"
_Shape = "Shape of the reply"


def typer_option(option: Option) -> Any:
    """An option of a request as one of a command."""
    several = option.kind in (list, dict)
    kind: Any = list[str] if several else option.kind
    shown = {list: "TEXT", dict: "TOKEN=NUMBER", int: "N", float: "X"}.get(option.kind)
    again = "; may be given several times" if several else ""
    return Annotated[
        kind | None,
        typer.Option(
            f"--{option.name.replace('_', '-')}",
            *option.flags,
            metavar=shown,
            help=f"{option.help[0].upper()}{option.help[1:]}{again}.",
            show_default=option.default_text,
            rich_help_panel=_Sampling if option.common else _Further,
        ),
    ]


def _store_option(panel: str | None) -> Any:
    return typer.Option(
        "--store",
        metavar="DIR",
        help="Folder of the sessions.",
        show_default="store, in the folder that `perdure paths` shows",
        rich_help_panel=panel,
    )


def _after_option(metavar: str) -> Any:
    return typer.Option("--after", metavar=metavar, help="Continue the list after this one.")


def _not_empty(name: str | None) -> str | None:
    """A name. An empty one, as of a variable that is not set, would mean that nothing is kept."""
    if name is not None and not name.strip():
        raise typer.BadParameter("a session needs a name that is not empty")
    return name


Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PROMPT",
        show_default=False,
        autocompletion=first_word,
        help="The model first, if you name one: a .gguf file, owner/repo or owner/repo:Q4_K_M on the "
        "Hugging Face hub, hf.co/owner/repo, a URL, or a name that `perdure ls` shows. Then the prompt; "
        "quotes around it are optional.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        show_default=False,
        autocompletion=model_names,
        help="The model. With it, all words belong to the prompt.",
    ),
]
ModelFor = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        autocompletion=model_names,
        show_default="that of `perdure config show`, else the small default model",
        help="The model to use.",
    ),
]
Session = Annotated[
    str | None,
    typer.Option(
        "--session",
        metavar="NAME",
        autocompletion=session_names,
        callback=_not_empty,
        help="Keep the conversation on disk under this name, or continue the one that has it.",
        rich_help_panel=_Talk,
    ),
]
Store = Annotated[Path | None, _store_option(_Talk)]
StoreFolder = Annotated[Path | None, _store_option(None)]
SessionName = Annotated[
    str,
    typer.Argument(
        metavar="NAME", autocompletion=session_names, help="The session, as `perdure sessions ls` shows it."
    ),
]
Namespace = Annotated[
    str,
    typer.Option(
        "--namespace",
        metavar="NAME",
        show_default="your own",
        help="Whose sessions: on a server each key has a namespace.",
    ),
]
Limit = Annotated[int | None, typer.Option("--limit", min=1, metavar="N", help="How many at most.")]
AfterName = Annotated[str | None, _after_option("NAME")]
AfterAddress = Annotated[str | None, _after_option("ADDRESS")]
AfterId = Annotated[str | None, _after_option("ID")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Skip confirmation.")]
Ctx = Annotated[
    int | None,
    typer.Option(
        "--ctx",
        min=1,
        metavar="N",
        show_default="4096",
        help="Context size: tokens of prompt and reply together.",
        rich_help_panel=_Engine,
    ),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Decode each reply alone, so that its last bit never depends on others.",
        rich_help_panel=_Engine,
    ),
]
SystemText = Annotated[
    str | None,
    typer.Option(
        "--system",
        "-s",
        metavar="TEXT|@FILE",
        help="System prompt, or @ and a file that has it.",
        rich_help_panel=_Talk,
    ),
]
Template = Annotated[
    str | None,
    typer.Option(
        "--template",
        metavar="NAME|FILE",
        show_default="the model's own",
        help="Chat template.",
        rich_help_panel=_Engine,
    ),
]
Schema = Annotated[
    Path | None,
    typer.Option(
        "--schema", metavar="FILE", help="JSON schema that replies must match.", rich_help_panel=_Shape
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
