"""Options that several commands share, each with one name, one meaning and its default."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from perdure.config import SETTINGS, settings
from perdure.errors import InvalidInputError
from perdure.options import Option

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
        from perdure import models
        from perdure.models.catalogue import catalogue

        here = (name for entry in models.entries() for name in (entry.name, *entry.aliases))
        return {*here, *(name for model in catalogue() for name in model.names)}

    return _completed(find, incomplete)


def _completed(find: Callable[[], Iterable[str]], incomplete: str) -> list[str]:
    # Whatever is wrong is told by the command itself; somebody who presses Tab wants names or nothing.
    with suppress(Exception):
        # A name that needs quotes would come out as several words.
        return sorted(name for name in find() if name.startswith(incomplete) and shlex.quote(name) == name)
    return []


# Options by the section of `--help` that lists them.

_TALK = "The conversation"
talk_option = partial(typer.Option, rich_help_panel=_TALK)
engine_option = partial(typer.Option, rich_help_panel="Engine")
shape_option = partial(typer.Option, rich_help_panel="Shape of the reply")
access_option = partial(typer.Option, rich_help_panel="Access")
limit_option = partial(typer.Option, rich_help_panel="Limits")


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


def number_or_auto(text: str | None) -> str | None:
    """A whole number from 1, or auto."""
    if text is not None and text != "auto" and not (text.isdecimal() and int(text) > 0):
        raise typer.BadParameter(f"a whole number from 1, or auto; got {text}")
    return text


def parse_auto(text: str | None) -> int | Literal["auto"] | None:
    """What `number_or_auto` let pass."""
    if text is None:
        return None
    return "auto" if text == "auto" else int(text)


def _kv_types(text: str | None) -> str | None:
    from perdure.models.fit import CACHE_BITS

    types = [] if text is None else text.split(":")
    if len(types) > 2 or not set(types) <= CACHE_BITS.keys():
        raise typer.BadParameter(f"one of {', '.join(CACHE_BITS)}, or two of them as K:V; got {text}")
    return text


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
Ctx = Annotated[
    str | None,
    engine_option(
        "--ctx",
        metavar="N|auto",
        show_default="4096",
        callback=number_or_auto,
        help="Context size: tokens of prompt and reply together; auto: as many as fit.",
    ),
]
DraftModel = Annotated[
    str | None,
    engine_option(
        "--draft",
        metavar="MODEL|mtp",
        help="What guesses ahead, for replies with --speculate: a smaller model of the same vocabulary, "
        "the model's assistant (Gemma 4), or mtp for its own next-token layers.",
    ),
]
KvType = Annotated[
    str | None,
    engine_option(
        "--kv-type",
        metavar="TYPE|K:V",
        show_default="f16",
        callback=_kv_types,
        help="Type of the K/V cache: f16, q8_0, q4_0 and others, or one for K and one for V.",
    ),
]
ForceKv = Annotated[
    bool, engine_option("--force-kv", help="Use a K/V type that was measured to cost the model much.")
]
Exact = Annotated[
    bool,
    engine_option("--exact", help="Decode each reply alone, so that its last bit never depends on others."),
]
SystemText = Annotated[
    str | None,
    talk_option("--system", "-s", metavar="TEXT|@FILE", help="System prompt, or @ and a file that has it."),
]
Lora = Annotated[
    list[str] | None,
    engine_option("--lora", metavar="FILE[:SCALE]", help="LoRA for every reply; may be given several times."),
]
ControlVector = Annotated[
    list[str] | None,
    engine_option(
        "--control-vector",
        metavar="FILE[@FIRST-LAST][:SCALE]",
        help="Control vector for every reply, on these layers; may be given several times.",
    ),
]
Template = Annotated[
    str | None,
    engine_option("--template", metavar="NAME|FILE", show_default="the model's own", help="Chat template."),
]
Schema = Annotated[
    Path | None, shape_option("--schema", metavar="FILE", help="JSON schema that replies must match.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


# Defaults of options, as the config file and the environment have them.

_OPTIONS = {setting.name for setting in SETTINGS} - {"model", "store", "engine"}
"""Settings that are options of the same name. The others are asked for where they are used."""


def defaults(command: Any, chosen: dict[str, Any]) -> dict[str, Any]:
    """What the config file and the environment say about the options of a command and of those below it."""
    below = getattr(command, "commands", {})
    own = {
        option.name: chosen[option.name]
        for option in command.params
        if option.name in _OPTIONS & chosen.keys()
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
