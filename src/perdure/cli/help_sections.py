"""`--help` in sections: options and commands by what they are about."""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from perdure.cli.command_names import shown_name

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
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        shown = [(name, command) for name, command in found if command is not None and not command.hidden]
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
        sections.setdefault(title, []).append((name, _explained(record[1])))
    _write(sections, formatter)


def _argument(name: str) -> str:
    """An argument in capitals, as what stands for a value; braces would say that it is to be typed."""
    return re.sub(r"\{(.*?)(\.\.\.)?\}", r"\1", name).upper()


def _named(name: str) -> str:
    """An option with a word for its value, instead of Python's name of the type."""
    for kind, word in _VALUES.items():
        name = name.replace(f" <{kind}>", word)
    return re.sub(r" <([^<>]*\|[^<>]*)>", r" \1", name)


def _explained(text: str) -> str:
    """A text without the bounds of a number, which an error tells, and with a default in plain words."""
    text = re.sub(r"; [^;\]]*x[<>]=[^;\]]*\]", "]", text)
    text = re.sub(r"\s*\[[^;\]]*x[<>]=[^;\]]*\]", "", text)
    text = re.sub(r"\[default: (\d+)\.0\]", r"[default: \1]", text)
    return re.sub(r"\[default: \((.*?)\)\]", r"[default: \1]", text)


def _write(sections: dict[str, list[tuple[str, str]]], formatter: Any) -> None:
    for title, rows in sections.items():
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)
