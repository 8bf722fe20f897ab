"""All commands in one place. A new one is an import and a line below, or part of an extension.

Commands import what they run inside their functions: `perdure --help` must not load the engine.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Container, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_name

from perdure import __version__
from perdure.cli.advice import show_warnings
from perdure.cli.commands import (
    background,
    chat,
    config,
    models,
    run,
    serve,
    sessions,
)
from perdure.cli.options.shared import defaults
from perdure.cli.output.terminal import note
from perdure.config import choices
from perdure.extension import extensions, imported

# `--help` in sections: options and commands by what they are about.

_ARGUMENTS, _OPTIONS, _COMMANDS = "Arguments", "Options", "Commands"
_VALUES = {"str": " TEXT", "float": " X", "int": " N", "int range": " N", "path": " PATH"}
"""What stands for the value of an option, by its type."""


class SectionedCommand(TyperCommand):
    """A command whose options are listed by their `rich_help_panel`, in plain text."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [_argument(piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)


class SectionedGroup(TyperGroup):
    """A group whose commands are listed by their `rich_help_panel`, in plain text, and are known by other
    names too."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # By the name that is shown, so that settings of the config file are found for it.
        return super().resolve_command(ctx, [shown_name(args[0], self.commands), *args[1:]])

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        shown = [(name, command) for name, command in commands if command is not None and not command.hidden]
        if not shown:
            return
        widest = max(len(name) for name, _ in shown)
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, command in shown:
            title = getattr(command, "rich_help_panel", None) or _COMMANDS
            # As wide everywhere, so that all sections have one second column.
            row = name.ljust(widest), command.get_short_help_str(formatter.width - widest - 6)
            sections.setdefault(title, []).append(row)
        _write(sections, formatter)


def in_sections(group: typer.Typer) -> None:
    """Have the help of a group, and of all below it, in sections."""
    group.info.cls = SectionedGroup
    for command in group.registered_commands:
        command.cls = SectionedCommand
    for each in group.registered_groups:
        if each.typer_instance is not None:
            in_sections(each.typer_instance)


def _write_options(command: Any, ctx: Any, formatter: Any) -> None:
    sections: dict[str, list[tuple[str, str]]] = {_ARGUMENTS: [], _OPTIONS: []}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is None:
            continue
        plain = _ARGUMENTS if parameter.param_type_name == "argument" else _OPTIONS
        title = getattr(parameter, "rich_help_panel", None) or plain
        name = _argument(record[0].partition(" <")[0]) if plain is _ARGUMENTS else _named(record[0])
        sections.setdefault(title, []).append((name, _plain_help(record[1])))
    _write(sections, formatter)


def _argument(name: str) -> str:
    """An argument in capitals, as what stands for a value; braces would say that it is to be typed."""
    return re.sub(r"\{(.*?)(\.\.\.)?\}", r"\1", name).upper()


def _named(name: str) -> str:
    """An option with a word for its value, instead of Python's name of the type."""
    for kind, word in _VALUES.items():
        name = name.replace(f" <{kind}>", word)
    return re.sub(r" <([^<>]*\|[^<>]*)>", r" \1", name)


def _plain_help(text: str) -> str:
    """A text without the bounds of a number, which an error gives, and with a default in plain words."""
    text = re.sub(r"; [^;\]\[]*x[<>]=[^;\]]*\]", "]", text)
    text = re.sub(r"\s*\[[^;\]]*x[<>]=[^;\]]*\]", "", text)
    text = re.sub(r"\[default: (\d+)\.0\]", r"[default: \1]", text)
    return re.sub(r"\[default: \((.*?)\)\]", r"[default: \1]", text)


def _write(sections: dict[str, list[tuple[str, str]]], formatter: Any) -> None:
    for title, rows in sections.items():
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)


_Ask = "Ask a model"
_Serve = "Serve a model"
_Kept = "What is kept"
_Models = "Models"
_Machine = "This machine"

app = typer.Typer(
    name="perdure",
    help="Local language models whose sessions last.",
    epilog='Begin with `perdure run "Why is the sky blue?"`; `perdure COMMAND --help` shows more.',
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Its frames and colours take half a second to import.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(version: bool) -> None:
    if version:
        typer.echo(f"perdure {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    if context.invoked_subcommand != "config":
        # `perdure config` is what mends a file that cannot be read.
        chosen = {name: choice.value for name, choice in choices().items()}
        context.default_map = defaults(context.command, chosen)


app.command(name="run", options_metavar="[OPTIONS] [MODEL]", rich_help_panel=_Ask)(run.run)
app.command(name="chat", options_metavar="[OPTIONS] [MODEL]", rich_help_panel=_Ask)(chat.chat)
app.command(name="serve", rich_help_panel=_Serve)(serve.serve)
for command in (background.page, background.start):
    app.command(
        rich_help_panel=_Serve,
        options_metavar="[MODEL] [OPTIONS OF SERVE]",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(command)
app.command(name="stop", rich_help_panel=_Serve)(background.stop)
app.command(name="status", rich_help_panel=_Serve)(background.status)
app.command(name="ps", hidden=True)(background.status)
app.add_typer(sessions.app, name="sessions", rich_help_panel=_Kept)
app.add_typer(models.app, name="models", rich_help_panel=_Models)
app.command(name="pull", rich_help_panel=_Models)(models.pull)
app.command(name="ls", rich_help_panel=_Models)(models.list_)
app.command(name="show", rich_help_panel=_Models)(models.inspect)
app.command(name="rm", rich_help_panel=_Models)(models.rm)
# By longer names.
app.command(name="inspect", hidden=True)(models.inspect)
app.add_typer(config.app, name="config", rich_help_panel=_Machine)
app.command(name="paths", rich_help_panel=_Machine)(config.paths)
in_sections(app)


def names_of(group: typer.Typer) -> set[str]:
    """The names of the commands of a group, as far as they were added."""
    commands = [
        each.name or get_command_name(each.callback.__name__)
        for each in group.registered_commands
        if each.callback
    ]
    return {*commands, *(each.name for each in group.registered_groups if isinstance(each.name, str))}


def group_named(name: str) -> typer.Typer | None:
    """A group of ours; the whole command without a name."""
    groups = {each.name: each.typer_instance for each in app.registered_groups}
    return groups.get(name) if name else app


def needs_extensions(words: Sequence[str]) -> bool:
    """Whether words may mean a command of an extension, or ask for a list of commands."""
    name = shown_name(words[0], names_of(app)) if words else ""
    group = group_named(name)
    if group is None:
        return name not in names_of(app)
    return len(words) < 2 or shown_name(words[1], names_of(group)) not in names_of(group)


@functools.cache
def add_extensions() -> None:
    """Have the commands of extensions too. A name that is taken stays what it is."""
    for extension in extensions().values():
        for command in extension.commands:
            group = group_named(command.below)
            if group is None or command.name in names_of(group):
                note(f"extension {extension.name}: no command {command.name}: that name is taken")
                continue
            try:
                target = imported(command.target)
            except Exception as error:
                note(f"extension {extension.name}: no command {command.name}: {error}")
                continue
            section = None if command.below else command.section
            if isinstance(target, typer.Typer):
                group.add_typer(target, name=command.name, rich_help_panel=section)
            else:
                group.command(name=command.name, rich_help_panel=section, **command.settings)(target)
    in_sections(app)


def start(arguments: Sequence[str]) -> None:
    """Run a command."""
    show_warnings()
    plain = as_options(plain_options(arguments))
    if needs_extensions(plain):
        add_extensions()
    group: Any = typer.main.get_command(app)
    command = group
    for word in plain:
        below = getattr(command, "commands", {})
        command = below.get(shown_name(word, below), command)
    if command.name in ("start", "page"):
        # What it is given goes to serve.
        command = group.commands["serve"]
    known = frozenset(name for option in command.params for name in (*option.opts, *option.secondary_opts))
    word_advice = advice_for_word(plain[0], group.commands) if plain else None
    if advice := word_advice or advice_for(plain, known):
        note(advice)
        raise SystemExit(2)
    # Shells complete `perdure`, also where it was started as a module.
    group(plain, prog_name="perdure")


# Other names of commands, as people's fingers know them. `--help` shows one name for each.

_LISTING = ("ls", "list", "show", "search", "stats")
_REMOVING = ("rm", "remove", "unset", "forget")
_MEANT = {
    "ls": _LISTING,
    "list": _LISTING,
    "show": _LISTING,
    "get": ("show",),
    "rm": _REMOVING,
    "remove": _REMOVING,
    "delete": _REMOVING,
    "create": ("add",),
}
"""What a word may stand for where there is no command of that name, the likeliest first."""
_QUESTIONS = {"help": "--help", "version": "--version"}
"""Words for what is asked by an option here."""


def shown_name(word: str, commands: Container[str]) -> str:
    """The name of the command that a word stands for, among `commands`; else the word itself."""
    if word in commands:
        return word
    return next((name for name in _MEANT.get(word, ()) if name in commands), word)


def as_options(arguments: Sequence[str]) -> list[str]:
    """Arguments with `help run` as `run --help`, and `version` as `--version`."""
    if arguments and (option := _QUESTIONS.get(arguments[0])) is not None:
        return [*arguments[1:], option]
    return list(arguments)


def advice_for_word(word: str, commands: Container[str]) -> str | None:
    """What to say about a first word that is no command but a question or a model, if it is one."""
    if shown_name(word, commands) in commands or word.startswith("-"):
        return None
    from perdure.models import names_model

    if any(letter.isspace() for letter in word.strip()):
        return "a question is asked by `perdure run`, or within a conversation by `perdure chat`"
    if names_model(word):
        return f"`perdure run {word} PROMPT` asks that model, `perdure chat {word}` talks with it"
    return None


# Options of other programs, in our words.

_OURS = {
    "--temp": "--temperature",
    "--n-predict": "--max-tokens",
    "--predict": "--max-tokens",
    "--num-predict": "--max-tokens",
    "--max-new-tokens": "--max-tokens",
    "--ctx-size": "--ctx",
    "--n-ctx": "--ctx",
    "--num-ctx": "--ctx",
    "--context-length": "--ctx",
    "--repetition-penalty": "--repeat-penalty",
    "--system-prompt": "--system",
    "-sys": "--system",
    "--chat-template": "--template",
    "--chat-template-file": "--template",
    "--json-schema": "--schema",
    "--json-schema-file": "--schema",
    "--grammar-file": "--grammar",
    "--parallel": "--slots",
    "-np": "--slots",
    "--num-parallel": "--slots",
    "--n-threads": "--threads",
    "--num-threads": "--threads",
    "-ctk": "--kv-type",
    "--cache-type-k": "--kv-type",
    "-ctv": "--kv-type",
    "--cache-type-v": "--kv-type",
    "-ncmoe": "--cpu-experts",
    "--n-cpu-moe": "--cpu-experts",
    "--cpu-moe": "--cpu-experts",
    "-ngl": "--gpu-layers",
    "--n-gpu-layers": "--gpu-layers",
    "--num-gpu": "--gpu-layers",
}
_INSTEAD = {
    "-p": 'the prompt needs no option: perdure run "PROMPT"',
    "--prompt": 'the prompt needs no option: perdure run "PROMPT"',
    "-hf": "a model on the hub is named in first place: perdure run owner/repo:Q4_K_M",
    "--hf-repo": "a model on the hub is named in first place: perdure run owner/repo:Q4_K_M",
    "--model-url": "a model's URL is named in first place: perdure run https://…/model.gguf",
    "-cnv": "a conversation in the terminal is perdure chat",
    "--conversation": "a conversation in the terminal is perdure chat",
    "--interactive": "a conversation in the terminal is perdure chat",
    "--api-key": "keys are in a file: perdure serve --keys FILE",
    "--keepalive": "the model is loaded as long as the command runs",
    "--format": "--schema FILE holds the reply to a JSON schema, --json prints all about it as JSON",
}


def plain_options(arguments: Sequence[str]) -> list[str]:
    """Arguments with underscores in the names of options as dashes: --max_tokens is --max-tokens."""
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    for at, word in enumerate(words[:end]):
        name, equals, value = word.partition("=")
        if name.startswith("--") and "_" in name:
            words[at] = name.replace("_", "-") + equals + value
    return words


def advice_for(arguments: Sequence[str], known: frozenset[str]) -> str | None:
    """What to say about the first option that belongs to another program, if there is one.

    `known` are the options of the command that was asked for.
    """
    for word in arguments:
        if word == "--":
            return None
        name = word.partition("=")[0]
        if name in known:
            continue
        if name in _INSTEAD:
            return f"{name}: {_INSTEAD[name]}"
        if name in _OURS:
            return f"{name} is called {_OURS[name]} here"
    return None
