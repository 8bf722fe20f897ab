"""Arguments of tool calls: what is wrong with them, by their tools' schemas."""

from __future__ import annotations

import pytest

from chat.conversations import TOOLS
from counting import calls_of
from perdure import Tool, ToolCall
from perdure.decode.sampling import grammar_checker
from perdure.ext.call_checks.arguments import check_arguments
from perdure.ext.call_checks.schema import first_problem


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("get_weather", '{"city": "Paris"}', None),
        (
            "get_weather",
            '{"city": "Paris", "days": [1, "a"]}',
            r"arguments.days\[1\]: 'a' is not of type 'integer'",
        ),
        ("get_weather", "{}", "arguments: 'city' is a required property"),
        ("get_weather", '{"city": 7}', "arguments.city: 7 is not of type 'string'"),
        ("get_weather", '{"city": "a", "unit": "kelvin"}', "arguments.unit: 'kelvin' is not one of"),
        ("search", '{"query": "a", "n": 1, "x": 2}', "'x' was unexpected"),
        ("search", "{oops", "the arguments of search must be JSON"),
        ("search", "[]", "must be a JSON object, got list"),
        ("other", "{}", "there is no tool 'other'; the tools are: get_weather, search"),
    ],
)
def test_what_is_wrong_with_a_call_is_said_in_a_sentence(
    name: str, arguments: str, words: str | None
) -> None:
    problem = check_arguments(ToolCall(id="", name=name, arguments=arguments), TOOLS)
    if words is None:
        assert problem is None
    else:
        assert problem is not None
        with pytest.raises(AssertionError, match=words):
            raise AssertionError(problem)


def test_a_schema_that_is_itself_wrong_is_said_so() -> None:
    wrong = Tool(name="f", parameters={"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}})
    problem = check_arguments(ToolCall(id="", name="f", arguments='{"a": 1}'), [wrong])
    assert problem is not None
    assert "the schema of f cannot be used" in problem


def test_a_pattern_of_a_tool_is_checked_before_this_process_compiles_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Class 8: the arguments of a call are validated in the server's process."""
    with calls_of(monkeypatch, (grammar_checker.checker, "check")) as checked:
        schema = {"properties": {"a": {"pattern": "^[a-c]+x?$"}}}
        assert first_problem(schema, {"a": "abc"}) is None
        assert first_problem(schema, {"a": "d"}) is not None
        assert checked.count == 1
