"""A reply under a schema, read: JSON, or an object of the class that was given."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, Field, TypeAdapter

import perdure
from perdure import GrammarError, InvalidInputError, SessionError
from perdure.decode.sampling.grammar import Grammar
from perdure.testing.toy import ToyModel


class City(BaseModel):
    model_config = {"extra": "forbid"}

    name: str = Field(max_length=5)
    old: bool


SCHEMA = City.model_json_schema()
ASKED: dict[str, Any] = {"max_tokens": 200, "temperature": 0}
HELLO = [{"role": "user", "content": "A city?"}]


@pytest.fixture(
    params=[
        pytest.param(False, id="in process"),
        pytest.param(True, id="isolated", marks=pytest.mark.extension("workers")),
    ]
)
def rt(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    source = "ext.workers.engines:full" if request.param else ToyModel()
    with perdure.open(source, n_ctx=1024, store=tmp_path, isolated=request.param) as runtime:
        yield runtime


def test_a_class_gives_its_objects(rt: Any) -> None:
    for reply in (
        rt.generate("A city?", schema=City, **ASKED),
        rt.chat(HELLO, schema=City, **ASKED),
        rt.session("a").say("A city?", schema=City, **ASKED),
    ):
        assert isinstance(reply.parsed, City)
        assert reply.parsed == City.model_validate_json(reply.text)
    # What is written down can be read by others.
    assert rt.session("a").history()[-1].settings["schema"] == SCHEMA


def test_a_class_and_functions_are_settings_of_a_session(rt: Any) -> None:
    """This process gets objects of the class; what is kept is JSON, which the next one opens it with too."""

    def weather(warm: bool) -> str:
        """The weather."""
        return f"{warm}"

    session = rt.session("typed", schema=City, tools=[weather], tool_choice="none")
    assert isinstance(session.say("A city?", **ASKED).parsed, City)
    assert isinstance(session.fork("typed too").say("A city?", **ASKED).parsed, City)
    assert session.settings["schema"] == SCHEMA
    assert session.settings["tools"][0]["function"]["name"] == "weather"
    again = rt.session("typed", schema=SCHEMA, tools=[weather], tool_choice="none")
    assert again is session
    with pytest.raises(SessionError, match="other settings"):
        rt.session("typed", schema=TypeAdapter(bool))
    with pytest.raises(InvalidInputError):
        rt.session("wrong", schema=object())


def test_an_adapter_of_types_and_a_mapping_do_too(rt: Any) -> None:
    assert isinstance(rt.generate("b", schema=TypeAdapter(City | bool), **ASKED).parsed, (City, bool))
    parsed = rt.chat(HELLO, schema=SCHEMA, **ASKED).parsed
    assert City(**parsed)


def test_a_reply_that_was_cut_is_refused_and_one_without_a_schema_is_none(rt: Any) -> None:
    cut = rt.generate("a", schema=City, max_tokens=2, temperature=0)
    with pytest.raises(GrammarError, match="allow more max_tokens"):
        _ = cut.parsed
    assert rt.generate("a", max_tokens=2).parsed is None
    assert rt.chat(HELLO, max_tokens=2).parsed is None


def test_log_probabilities_have_the_text_of_their_tokens(rt: Any) -> None:
    reply = rt.generate("a", max_tokens=8, temperature=0, logprobs=2, ignore_eos=True)
    assert "".join(each.text for each in reply.logprobs) == reply.text
    assert all(other.text for each in reply.logprobs for other in each.top)
    scored = rt.score("hello", top=1).prompt_logprobs
    assert "".join(each.text for each in scored[1:]) == "ello"


@pytest.mark.parametrize(
    ("keywords", "problem"),
    [
        ({"stop": 5}, "stop is a text, or several"),
        ({"response_format": {}}, "called 'schema' here"),
        ({"toolz": []}, "did you mean 'tools'"),
        ({"mmproj": "x"}, "is found beside the model's file"),
    ],
)
def test_mistakes_in_keywords_of_a_chat_are_named(keywords: Any, problem: str) -> None:
    with perdure.open(ToyModel(), n_ctx=256) as rt:
        with pytest.raises(InvalidInputError, match=problem):
            rt.chat(HELLO, **keywords)
        with pytest.raises(InvalidInputError, match="did you mean 'system'"):
            rt.session("a", systm="x")  # type: ignore[call-arg]


def test_objects_of_a_class_have_its_fields_alone() -> None:
    class Place(BaseModel):
        type: str
        properties: dict[str, int] = {}

    class Open(BaseModel):
        model_config = {"extra": "allow"}

        places: list[Place]

    written = json.loads(Grammar.json_schema(Open).text)
    assert written["additionalProperties"] is True
    assert written["$defs"]["Place"]["additionalProperties"] is False
    assert set(written["$defs"]["Place"]["properties"]) == {"type", "properties"}
    # A schema of the caller's means what it says.
    assert "additionalProperties" not in json.loads(Grammar.json_schema(Place.model_json_schema()).text)
