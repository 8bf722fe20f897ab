"""Options of other programs and misspelt ones are answered with ours."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure import InvalidInputError


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("n_threads", "'n_threads' is called 'threads' here"),
        ("num_ctx", "'num_ctx' is called 'n_ctx' here"),
        ("treads", "there is no option 'treads'; did you mean 'threads'?"),
        ("nonsense", "there is no option 'nonsense'; there are "),
    ],
)
def test_open_refuses_an_unknown_option_before_a_model_is_looked_for(name: str, said: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        perdure.open("/nowhere/model.gguf", **{name: 4})  # type: ignore[arg-type]
    assert said in str(raised.value)


def test_models_and_contexts_refuse_an_unknown_option(zoo_path: Callable[[str], Path]) -> None:
    unknown: dict[str, Any] = {"n_gpu_layers": 1}
    with pytest.raises(InvalidInputError, match="'n_gpu_layers' is called 'gpu_layers' here"):
        perdure.Model("/nowhere/model.gguf", **unknown)
    with perdure.Model(zoo_path("llama")) as model:
        for unknown, said in (
            ({"n_threads": 1}, "'n_threads' is called 'threads' here"),
            ({"flash_atn": True}, "there is no option 'flash_atn'; did you mean 'flash'"),
        ):
            with pytest.raises(InvalidInputError, match=re.escape(said)):
                model.context(**unknown)


def test_a_session_refuses_an_unknown_option_before_it_is_made(zoo_path: Callable[[str], Path]) -> None:
    unknown: dict[str, Any] = {"temprature": 1}
    with perdure.open(zoo_path("llama"), n_ctx=64, slots=1, threads=1) as rt:
        with pytest.raises(InvalidInputError, match="did you mean 'temperature'"):
            rt.session("a", **unknown)
        assert not rt.sessions.list()
        with pytest.raises(InvalidInputError, match="did you mean 'temperature'"):
            rt.session("a").say("hi", **unknown)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("max_new_tokens", "'max_new_tokens' is called 'max_tokens' here"),
        ("temp", "'temp' is called 'temperature' here"),
        ("temperture", "did you mean 'temperature'?"),
        ("stops", "did you mean 'stop'?"),
    ],
)
def test_a_request_refuses_an_unknown_option(zoo_path: Callable[[str], Path], name: str, said: str) -> None:
    unknown: dict[str, Any] = {name: 1}
    with perdure.open(zoo_path("llama"), n_ctx=64, slots=1, threads=1) as rt:
        with pytest.raises(InvalidInputError) as raised:
            rt.generate("the man", **unknown)
        assert said in str(raised.value)
        with pytest.raises(InvalidInputError) as raised:
            rt.chat([{"role": "user", "content": "hi"}], **unknown)
        assert said in str(raised.value)
