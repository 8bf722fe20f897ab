"""Options that several commands share, each with one name, one meaning and its default."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from perdure.config import settings
from perdure.engine_config import EngineConfig, LoadingConfig, engine_options
from perdure.errors import InvalidInputError
from perdure.options import Option, options_of

# Names that a shell can complete: of sessions, and of models.

_MANY = 1000
"""Sessions that are looked through, the latest first."""


def session_names(context: typer.Context, incomplete: str) -> list[str]:
    """Sessions in the store that the command is about."""

    def find() -> Iterable[str]:
        from perdure.cli.runtime import session_store_in

        store, namespace = context.params.get("store"), context.params.get("namespace")
        with session_store_in(Path(store) if store else None) as session_store:
            rows = session_store.list(namespace or "", limit=_MANY)
        named = context.params.get("names") or ()
        return (row.name for row in rows if row.name not in named)

    return _completed(find, incomplete)


def first_word(context: typer.Context, incomplete: str) -> list[str]:
    """Models, unless one was named: what follows is a prompt."""
    named = context.params.get("words") or context.params.get("model")
    return [] if named else model_names(incomplete)


def model_names(incomplete: str) -> list[str]:
    """Models that have a name, and those that were fetched."""

    def find() -> Iterable[str]:
        from perdure.models.finder import finder

        return finder().all_names()

    return _completed(find, incomplete)


def _completed(find: Callable[[], Iterable[str]], incomplete: str) -> list[str]:
    # The command itself reports errors; somebody who presses Tab wants names or nothing.
    with suppress(Exception):
        # A name that needs quotes would come out as several words.
        return sorted(name for name in find() if name.startswith(incomplete) and shlex.quote(name) == name)
    return []


# Options by the section of `--help` that lists them.

_TALK, _ENGINE = "The conversation", "Engine"
talk_option = partial(typer.Option, rich_help_panel=_TALK)
shape_option = partial(typer.Option, rich_help_panel="Shape of the reply")
access_option = partial(typer.Option, rich_help_panel="Access")
limit_option = partial(typer.Option, rich_help_panel="Limits")


of_engine = partial(typer.Option, rich_help_panel=_ENGINE)


def engine_option(name: str, show_default: str = "") -> Any:
    """An option of the engine as one of a command."""
    option = engine_options()[name]
    words = option.command.replace("_", "-")
    flag = f"--{words}/--no-{words}" if option.usual is True else f"--{words}"
    several = option.kind is list and option.keys is str
    default: Any = show_default or option.default_text
    numeric = option.kind in (int, float) and not option.words
    return typer.Option(
        flag,
        metavar=option.metavar or {int: "N", float: "X", str: "TEXT"}.get(option.kind),
        help=f"{option.help[0].upper()}{option.help[1:]}{'; may be given several times' if several else ''}.",
        show_default=default if option.kind is not bool and default != "none" else True,
        min=option.low if numeric else None,
        max=option.high if numeric else None,
        callback=None if several else lambda value: _checked(option, value),
        rich_help_panel="GPU" if name in options_of(LoadingConfig) else _ENGINE,
    )


def _checked(option: Option, value: Any) -> Any:
    """A value as it was typed, if it is one of the option."""
    try:
        if value is not None:
            parsed = option.parse(value) if isinstance(value, str) else value
            EngineConfig.from_options({option.name: parsed})
    except InvalidInputError:
        raise typer.BadParameter(f"{option.range}; got {value}") from None
    return value


def engine_annotation(option: Option) -> Any:
    """The type of an option of the engine as typer takes it: one that may be a word is a text."""
    if option.kind is list:
        kind: Any = list[str] if option.keys is str else str
    else:
        kind = str if option.words else option.kind
    return Annotated[kind if kind is bool else kind | None, engine_option(option.name)]


def typer_option(option: Option) -> Any:
    """An option of a request as one of a command."""
    several = option.kind in (list, dict)
    kind: Any = list[str] if several else option.kind
    shown = {list: "TEXT", dict: "TOKEN=NUMBER", int: "N", float: "X"}.get(option.kind)
    if option.choices:
        shown = "|".join(option.choices)
    again = "; may be given several times" if several else ""
    return Annotated[
        kind | None,
        typer.Option(
            f"--{option.name.replace('_', '-')}",
            *option.flags,
            metavar=shown,
            help=f"{option.help[0].upper()}{option.help[1:]}{again}.",
            show_default=option.default_text,
            rich_help_panel="Sampling" if option.common else "Further sampling",
        ),
    ]


def _store_folder(text: str) -> Path:
    """A folder, or the one that stands on this machine for a database."""
    from perdure.sessions.store.registry import store_folder

    try:
        return store_folder(text)
    except InvalidInputError as error:
        raise typer.BadParameter(str(error)) from None


def _store_option(panel: str | None) -> Any:
    return typer.Option(
        "--store",
        metavar="DIR|URL",
        parser=_store_folder,
        help="Folder of the sessions, or postgresql://… for those of several machines.",
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


_USUAL_MODEL = "that of `perdure config show`, else the small default model"
model_option = partial(typer.Option, "--model", "-m", metavar="MODEL", autocompletion=model_names)
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
    model_option(show_default=False, help="The model. With it, all words belong to the prompt."),
]
ModelFor = Annotated[str | None, model_option(show_default=_USUAL_MODEL, help="The model to use.")]
ModelName = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        autocompletion=model_names,
        show_default=_USUAL_MODEL,
        help="A .gguf file, or any name that `perdure pull` takes.",
    ),
]
Session = Annotated[
    str | None,
    talk_option(
        "--session",
        metavar="NAME",
        autocompletion=session_names,
        callback=_not_empty,
        help="Keep the conversation on disk under this name, or continue the one that has it.",
    ),
]
Store = Annotated[Path | None, _store_option(_TALK)]
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
Ctx = Annotated[str | None, engine_option("n_ctx")]
GpuLayers = Annotated[str | None, engine_option("gpu_layers")]
SystemText = Annotated[
    str | None,
    talk_option("--system", "-s", metavar="TEXT|@FILE", help="System prompt, or @ and a file that has it."),
]
Lora = Annotated[
    list[str] | None,
    of_engine("--lora", metavar="FILE[:SCALE]", help="LoRA for every reply; may be given several times."),
]
ControlVector = Annotated[
    list[str] | None,
    of_engine(
        "--control-vector",
        metavar="FILE[@FIRST-LAST][:SCALE]",
        help="Control vector for every reply, on these layers; may be given several times.",
    ),
]
Template = Annotated[
    str | None,
    of_engine("--template", metavar="NAME|FILE", show_default="the model's own", help="Chat template."),
]
Schema = Annotated[
    Path | None, shape_option("--schema", metavar="FILE", help="JSON schema that replies must match.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


# Defaults of options, as the config file and the environment have them.

_USED_ELSEWHERE = ("model", "store", "engine")
"""Settings that are asked for where they are used. The others are options of the same name."""


def defaults(command: Any, chosen: dict[str, Any]) -> dict[str, Any]:
    """What the config file and the environment say about the options of a command and of those below it."""
    below = getattr(command, "commands", {})
    own = {
        option.name: chosen[option.name]
        for option in command.params
        if option.name in chosen and option.name not in _USED_ELSEWHERE
    }
    return own | {name: defaults(each, chosen) for name, each in below.items()}


def usual_value(group: Any, name: str) -> str:
    """What a setting is where nobody has chosen it, as the help of its option says."""
    if name == "model":
        return "the small default model"
    if name == "store":
        now = settings()
        return now.database or str(now.store)
    if name == "engine":
        return "small ones that fit the machine, else cpu"
    options = [option for each in ("serve", "chat") for option in group.commands[each].params]
    option = next(option for option in options if option.name == name)
    if isinstance(option.show_default, str):
        return option.show_default
    if isinstance(option.default, bool):
        return str(option.default).lower()
    if isinstance(option.default, float):
        return f"{option.default:g}"
    return "none" if option.default is None else str(option.default)
