"""Commands by the names that people's fingers know, and first words that are no command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer

from perdure.cli.app import advice_for_word, app, as_options, needs_extensions

ROOT: Any = typer.main.get_command(app)


def groups(command: Any) -> Iterator[Any]:
    if hasattr(command, "commands"):
        yield command
        for each in command.commands.values():
            yield from groups(each)


def test_what_can_be_listed_or_removed_is_so_by_every_usual_word() -> None:
    """By the name that is shown, for which settings of the config file are found."""
    listing: list[str] = []
    removing: list[str] = []
    for group in groups(ROOT):
        with group.make_context(group.name, [], resilient_parsing=True) as context:
            for word, meant, found in (
                ("list", {"ls", "show", "search", "stats"}, listing),
                ("ls", {"ls", "show", "search", "stats"}, listing),
                ("remove", {"rm", "unset", "forget"}, removing),
                ("delete", {"rm", "unset", "forget"}, removing),
            ):
                if meant & set(group.commands):
                    name, command, rest = group.resolve_command(context, [word, "x"])
                    assert command is group.commands[name]
                    assert (name in meant, rest) == (True, ["x"])
                    found.append(group.name)
    assert {*listing} >= {"perdure", "sessions", "models", "config"}
    assert {*removing} >= {"perdure", "sessions", "models", "config"}


def test_help_shows_one_name_for_each() -> None:
    for group in groups(ROOT):
        assert not {"list", "remove", "delete"} & set(group.commands)


def test_help_and_version_are_words_too() -> None:
    assert as_options(["help", "run"]) == ["run", "--help"]
    assert as_options(["version"]) == ["--version"]
    assert as_options(["run", "help"]) == ["run", "help"]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("Why is the sky blue?", "`perdure run`"),
        ("model.gguf", "`perdure chat model.gguf`"),
        pytest.param(
            "owner/repo:Q8_0",
            "`perdure run owner/repo:Q8_0 PROMPT`",
            marks=pytest.mark.extension("fetching"),
        ),
    ],
)
def test_a_question_or_a_model_in_first_place_is_told_the_command(word: str, said: str) -> None:
    assert said in (advice_for_word(word, ROOT.commands) or "")


@pytest.mark.parametrize("word", ["run", "list", "sesions", "--help"])
def test_other_words_are_left_to_the_command(word: str) -> None:
    assert advice_for_word(word, ROOT.commands) is None


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        ([], True),
        (["run", "hi"], False),
        (["nonsense", "x"], True),
        (["sessions"], True),
        (["sessions", "--help"], True),
        (["sessions", "list"], False),
        (["sessions", "nothing"], True),
    ],
)
def test_extensions_are_read_where_a_command_may_be_one_of_theirs(words: list[str], needed: bool) -> None:
    assert needs_extensions(words) == needed
