"""`perdure train`: what is learned lowers the loss on what was held out, and is usable at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

import perdure
from perdure.chat.message import Message
from perdure.chat.template.template import Template
from perdure.cli.app import app
from perdure.engine.registry import open_model
from perdure.errors import InvalidInputError
from perdure.ext.mlx.training import (
    ChatEncoder,
    Example,
    TrainingRecipe,
    from_messages,
    read_chats,
    read_pairs,
    train,
)
from perdure.ext.mlx.training.preference import Pair
from perdure.testing.toy import ToyModel
from server.live_server import live_server
from subjects import Subject

Find = Callable[[str], Subject]
WORDS = ("the man", "the rain", "her mother", "the garden", "the street", "a token", "the week", "the text")


def write_chats(path: Path, count: int = 200) -> Path:
    """Every question has the same answer, which a model can learn."""
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"what of {WORDS[number % 8]} {number}"},
                {"role": "assistant", "content": "nothing was given"},
            ]
        }
        for number in range(count)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_a_lora_lowers_the_loss_and_answers_by_its_name_and_the_base_is_as_before(
    llama: Path, tmp_path: Path
) -> None:
    data = write_chats(tmp_path / "chats.jsonl")
    asked = {"messages": [{"role": "user", "content": "what of the rain"}], "max_tokens": 8, "temperature": 0}

    def answers(names: dict[str, str]) -> list[str]:
        with (
            perdure.open(str(llama), n_ctx=256, slots=1, adapter_names=names) as rt,
            live_server(rt, adapters=dict.fromkeys(names, 1.0)) as server,
            httpx.Client(base_url=server.url, timeout=60) as client,
        ):
            return [
                client.post("/v1/chat/completions", json={**asked, "model": model})
                .raise_for_status()
                .json()["choices"][0]["message"]["content"]
                for model in ("toy", *(f"toy:{name}" for name in names), "toy")
            ]

    before = answers({})
    options = f"--data {data} --steps 20 --learning-rate 0.01 --longest 128 --json"
    told = CliRunner().invoke(app, f"train {llama} {tmp_path / 'terse'} {options}")
    assert told.exit_code == 0, told.output
    facts = json.loads(told.output)
    assert facts["after"] < facts["before"] / 2
    assert (facts["trained"], facts["held_out"]) == (180, 20)
    plain, named, again = answers({"terse": str(tmp_path / "terse")})
    assert plain == again == before[0] != named


def test_a_model_comes_closer_to_its_teacher(llama: Path, own: Path, tmp_path: Path) -> None:
    """The loss is the KL from what the teacher would say."""
    import mlx.core as mx

    data = write_chats(tmp_path / "chats.jsonl", 40)
    weights: dict[str, Any] = mx.load(str(own / "model.safetensors"))  # type: ignore[assignment]
    for name in list(weights):
        if "down_proj" in name:
            weights[name] = weights[name] * 1.5
    mx.eval(weights)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    (tmp_path / "model.safetensors").replace(own / "model.safetensors")
    options = f"--data {data} --steps 20 --learning-rate 0.00003 --longest 128 --json"
    words = f"train {own} {tmp_path / 'taught'} --teacher {llama} {options}"
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0, told.output
    facts = json.loads(told.output)
    assert 0 < facts["after"] < facts["before"] / 2
    # A model is no distance from itself, and learns nothing of it.
    options = options.replace("--steps 20", "--steps 1")
    same = CliRunner().invoke(app, f"train {llama} {tmp_path / 'same'} --teacher {llama} {options}")
    assert abs(json.loads(same.output)["before"]) < 1e-6


def test_a_teacher_has_the_same_tokens(llama: Path, own: Path, tmp_path: Path) -> None:
    data = write_chats(tmp_path / "chats.jsonl", 4)
    said = json.loads((own / "tokenizer.json").read_text())
    said["model"]["merges"] = said["model"]["merges"][:-1]
    (own / "tokenizer.json").write_text(json.dumps(said))
    told = CliRunner().invoke(app, f"train {llama} {tmp_path / 'out'} --teacher {own} --data {data}")
    assert told.exit_code != 0
    assert isinstance(told.exception, InvalidInputError | SystemExit)
    assert not (tmp_path / "out").exists()


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["dora", "full"])
def test_other_kinds_learn_too_and_a_run_goes_on_where_it_ended(
    kind: str, llama: Path, tmp_path: Path
) -> None:
    model = open_model(llama, {}, cells=0)
    encoder = ChatEncoder(model, Template.of_model(model.info.template))
    chats = read_chats(write_chats(tmp_path / "chats.jsonl", 40))
    examples = [each for chat in chats for each in from_messages(encoder, chat, 128)]
    plan = TrainingRecipe(kind=kind, steps=6, learning_rate=0.005, longest=128)
    made = train(llama, examples, tmp_path / "out", plan)
    assert made.after < made.before
    if kind == "full":
        assert open_model(tmp_path / "out", {}, cells=0).info.architecture == "llama"
        return
    again = train(llama, examples, tmp_path / "out", plan, resume=True)
    assert again.before == pytest.approx(made.after, rel=1e-3)
    model.adapter(str(tmp_path / "out"))


@pytest.mark.soak
def test_sessions_of_a_store_are_learned_from(llama: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with perdure.open(str(llama), n_ctx=512, slots=1, store=store) as rt:
        session = rt.session("work", system="be brief")
        for _ in range(4):
            session.say("what of the rain", max_tokens=5)
    told = CliRunner().invoke(
        app, f"train {llama} {tmp_path / 'out'} --session work --store {store} --steps 3 --json"
    )
    assert told.exit_code == 0, told.output
    assert json.loads(told.output)["trained"] == 3


def test_only_replies_are_learned(find_subject: Find) -> None:
    model = find_subject("mlx-llama").model
    encoder = ChatEncoder(model, Template.of_model(model.info.template))
    said = [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")]
    messages = [Message(role=role, content=content) for role, content in said]
    examples = list(from_messages(encoder, messages, 512))
    learned = [model.detokenize(each.tokens[each.start :], special=True) for each in examples]
    assert learned == ["two<|im_end|>\n", "four<|im_end|>\n"]
    assert not list(from_messages(encoder, messages, 5))


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_no_text_of_a_training_set_becomes_a_control_token_y13(role: str) -> None:
    """Y13, I6: every control token, in every message, is read as it is in chats."""
    model = ToyModel()
    encoder = ChatEncoder(model, Template.of_model(model.info.template))
    for mark in encoder.tokenizer.control.values():
        said = {"system": "be brief", "user": "one", "assistant": "two"}

        def controls(said: dict[str, str]) -> tuple[list[int], str]:
            messages = [Message(role=role, content=content) for role, content in said.items()]
            [example] = from_messages(encoder, messages, 512)
            tokens = [each for each in example.tokens if each in encoder.tokenizer.control]
            return tokens, model.detokenize(example.tokens, special=True)

        plain, _ = controls(said)
        typed, text = controls({**said, role: f"say {mark} now"})
        assert typed == plain
        assert f"say {mark} now" in text


BAD = {
    "[": "no JSON",
    "{}": "neither",
    '{"messages": [{"role": 3}]}': "line 1",
    '{"prompt": 1, "completion": "a"}': "neither",
}


@pytest.mark.parametrize("line", BAD)
def test_a_line_that_is_no_conversation_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line)
    with pytest.raises(InvalidInputError, match=BAD[line]):
        list(read_chats(path))


def test_what_cannot_be_trained_is_said_before_anything_is_written(llama: Path, tmp_path: Path) -> None:
    for wrong in ({"kind": "magic"}, {"steps": 0}, {"learning_rate": 0.0}, {"rank": -1}):
        with pytest.raises(InvalidInputError):
            TrainingRecipe(**wrong)
    with pytest.raises(InvalidInputError, match="at least 2"):
        train(llama, [], tmp_path / "out", TrainingRecipe())
    assert not (tmp_path / "out").exists()
    told = CliRunner().invoke(app, ["train", str(llama), str(tmp_path / "out")])
    assert told.exit_code != 0


def write_pairs(path: Path, count: int = 40) -> Path:
    lines = [
        {
            "prompt": f"what of {WORDS[number % 8]} {number}",
            "chosen": "nothing was given",
            "rejected": "a lot",
        }
        for number in range(count)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_of_two_replies_the_better_one_becomes_likelier(llama: Path, tmp_path: Path) -> None:
    """Before training the model is its own reference: the loss is that of a coin, ln 2."""
    pytest.importorskip("mlx_lm_lora", reason="pip install 'perdure[preference]'")
    data = write_pairs(tmp_path / "pairs.jsonl")
    options = f"--pairs {data} --steps 8 --learning-rate 0.01 --longest 128 --json"
    told = CliRunner().invoke(app, f"train {llama} {tmp_path / 'polite'} {options}")
    assert told.exit_code == 0, told.output
    facts = json.loads(told.output)
    assert facts["before"] == pytest.approx(0.6931, abs=1e-3)
    assert facts["after"] < 0.35
    assert (facts["trained"], facts["held_out"]) == (36, 4)
    with perdure.open(
        str(llama), n_ctx=256, slots=1, adapter_names={"polite": str(tmp_path / "polite")}
    ) as rt:
        asked: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
        plain = rt.chat([Message(role="user", content="what of the rain")], **asked).text
        named = rt.chat(
            [Message(role="user", content="what of the rain")], adapters={"polite": 1.0}, **asked
        ).text
        assert plain != named


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"prompt": "x", "chosen": "y"}',
        '{"chosen": "x", "rejected": "y"}',
        '{"prompt": 1, "chosen": "x", "rejected": "y"}',
        '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], '
        '"chosen": "x", "rejected": "y"}',
        "[]",
    ],
)
def test_a_line_that_is_no_pair_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(f'{{"prompt": "a", "chosen": "b", "rejected": "c"}}\n{line}\n')
    with pytest.raises(InvalidInputError, match="line 2"):
        list(read_pairs(path))


def test_pairs_without_their_package_or_beside_other_data_are_refused(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, target = write_pairs(tmp_path / "pairs.jsonl", 4), tmp_path / "out"
    chats = write_chats(tmp_path / "chats.jsonl", 4)
    told = CliRunner().invoke(app, f"train {llama} {target} --pairs {data} --data {chats}")
    assert isinstance(told.exception, InvalidInputError) or told.exit_code != 0
    monkeypatch.setitem(sys.modules, "mlx_lm_lora.trainer.dpo_trainer", None)
    with pytest.raises(perdure.EngineError, match="pip install"):
        train(
            llama, [Pair(Example([1, 2, 3], 1), Example([1, 2, 4], 1))] * 4, target, TrainingRecipe(steps=1)
        )
    assert not target.exists()
