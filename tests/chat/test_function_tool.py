"""Tools that are typed functions: what a model is told of them."""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal, TypedDict

import pytest
from pydantic import BaseModel

import perdure
from perdure import InvalidInputError, Tool
from perdure.testing.toy import ToyModel


class Unit(enum.Enum):
    CELSIUS = "C"
    FAHRENHEIT = "F"


class Place(TypedDict):
    city: str
    zip: int


class Point(BaseModel):
    x: float


def weather(
    city: str,
    days: int = 3,
    unit: Unit = Unit.CELSIUS,
    kind: Literal["short", "long"] | None = None,
    near: Annotated[list[Place], "Places to leave out."] = [],  # noqa: B006
) -> str:
    """The weather of a city.

    Args:
        city: where, as "Paris"
        days (int): how many to look ahead
    """
    return f"{city} {days} {unit} {kind} {near}"


def test_a_function_is_a_tool_with_a_schema_of_its_parameters() -> None:
    tool = Tool.parse(weather)
    assert (tool.name, tool.description) == ("weather", "The weather of a city.")
    place = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "zip": {"type": "integer"}},
        "required": ["city", "zip"],
    }
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "city": {"description": 'where, as "Paris"', "type": "string"},
            "days": {"description": "how many to look ahead", "type": "integer", "default": 3},
            "unit": {"enum": ["C", "F"]},
            "kind": {"anyOf": [{"enum": ["short", "long"]}, {"type": "null"}]},
            "near": {"description": "Places to leave out.", "type": "array", "items": place},
        },
        "required": ["city"],
        "additionalProperties": False,
    }


def test_sphinx_docstrings_classes_of_pydantic_and_untyped_parameters_are_read() -> None:
    def go(to: Point, why, marks: dict[str, int]) -> None:  # type: ignore[no-untyped-def]
        """Move.

        :param to: the place
        """

    properties = Tool.parse(go).parameters["properties"]
    assert properties["to"]["description"] == "the place"
    assert properties["to"]["properties"]["x"]["type"] == "number"
    assert properties["why"] == {}
    assert properties["marks"] == {"type": "object", "additionalProperties": {"type": "integer"}}


def positional(a: int, /) -> None: ...
def several(*words: str) -> None: ...
def odd(a: bytes) -> None: ...
def unknown(a: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821
def pair(a: tuple[int, str]) -> None: ...


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (positional, "arguments by name"),
        (several, "arguments by name"),
        (odd, "no JSON schema: <class 'bytes'>"),
        (unknown, "cannot be read: name 'Nowhere'"),
        (pair, "use list"),
        (lambda a: a, "name"),
    ],
)
def test_what_a_model_cannot_call_is_refused_in_words(function: Any, problem: str) -> None:
    with pytest.raises(InvalidInputError, match=problem):
        Tool.parse(function)


def test_a_reply_calls_a_function_and_a_session_writes_the_tool_down(tmp_path: Any) -> None:
    with perdure.open(ToyModel(), n_ctx=2048, store=tmp_path) as rt:
        session = rt.session("a")
        reply = session.say("Paris?", tools=[weather], tool_choice="weather", max_tokens=200)
        assert [call.name for call in reply.tool_calls] in (["weather"], [])
        assert rt.session("a").history()[-1].settings["tools"] == [Tool.parse(weather).to_dict()]
