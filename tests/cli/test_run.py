"""`perdure run`, as a user runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.pty_user import piped, terminal
from homes import new_home
from ollama_files import put_ollama
from perdure.models.registry import DEFAULT, MODELS

COMMAND = [sys.executable, "-m", "perdure.cli", "run"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def environment(zoo_path: Callable[[str], Path], tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PERDURE_MODEL": str(zoo_path("llama")),
        "PERDURE_HOME": str(new_home(tmp_path / "home")),
        "COLUMNS": "200",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture
def run(environment: dict[str, str]) -> Run:
    def start(*arguments: str, pipe: str | None = None) -> subprocess.CompletedProcess[str]:
        return piped(environment, pipe, "run", *arguments)

    return start


def reply(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


GREEDY = ("--temperature", "0", "--max-tokens", "8")


def test_help_lists_every_option(run: Run) -> None:
    done = run("--help")
    assert done.returncode == 0
    shown = set(re.findall(r"--[a-z-]+", done.stdout))
    assert shown >= {
        "--model",
        "--file",
        "--raw",
        "--system",
        "--continue",
        "--session",
        "--no-stream",
        "--ctx",
        "--max-tokens",
        "--stop",
        "--samples",
        "--exact",
        "--temperature",
        "--top-p",
        "--top-k",
        "--min-p",
        "--repeat-penalty",
        "--seed",
        "--schema",
        "--regex",
        "--grammar",
        "--json",
        "--logprobs",
        "--verbose",
        "--help",
    }


def test_the_text_goes_to_standard_output_and_nothing_else_does(run: Run) -> None:
    done = run("the man who was", *GREEDY)
    assert (done.returncode, done.stderr) == (0, "")
    expected = reply(run("the man who was", *GREEDY, "--json"))
    assert done.stdout.removesuffix("\n") == expected["text"].removesuffix("\n")
    assert done.stdout.endswith("\n")


def test_a_prompt_can_come_from_a_pipe_in_three_ways(run: Run) -> None:
    argued = reply(run("the man\n\nwas reading", *GREEDY, "--json"))
    for given in (
        run(*GREEDY, "--json", pipe="the man\n\nwas reading\n"),
        run("-", *GREEDY, "--json", pipe="the man\n\nwas reading\n"),
        run("the man", *GREEDY, "--json", pipe="was reading\n"),
    ):
        assert reply(given)["tokens"] == argued["tokens"]
        assert reply(given)["usage"] == argued["usage"]


def test_json_has_text_tokens_reasons_counts_and_speeds(run: Run) -> None:
    found = reply(run("the man", *GREEDY, "--json", "--seed", "7"))
    assert len(found["tokens"]) == 8
    assert found["finish_reason"] == "length"
    assert found["seed"] == 7
    assert found["usage"]["completion_tokens"] == 8
    assert found["usage"]["prompt_tokens"] > 0
    assert found["timings"]["prefill_speed"] > 0
    assert found["timings"]["decode_speed"] > 0
    assert found["logprobs"] is None


def test_the_same_seed_gives_the_same_text_and_exact_changes_nothing_alone(run: Run) -> None:
    arguments = ("the man", "-t", "1.2", "-n", "12", "--seed", "5", "--json")
    first, second = reply(run(*arguments)), reply(run(*arguments, "--exact"))
    assert first["tokens"] == second["tokens"]
    assert (
        reply(run("the man", "-t", "1.2", "-n", "12", "--seed", "6", "--json"))["tokens"] != first["tokens"]
    )


@pytest.mark.parametrize(
    "narrowed", [("--top-k", "1"), ("--top-p", "0"), ("--min-p", "1")], ids=["top-k", "top-p", "min-p"]
)
def test_a_draw_from_one_token_is_greedy(run: Run, narrowed: tuple[str, str]) -> None:
    found = reply(run("the man", "-t", "1.5", "-n", "8", "--json", *narrowed))
    assert found["tokens"] == reply(run("the man", *GREEDY, "--json"))["tokens"]


def test_a_repeat_penalty_changes_what_is_drawn(run: Run) -> None:
    plain = reply(run("the man", "-t", "0", "-n", "40", "--json"))
    penalised = reply(run("the man", "-t", "0", "-n", "40", "--json", "--repeat-penalty", "5"))
    assert len(set(penalised["tokens"])) > len(set(plain["tokens"]))


def test_stops_end_the_text_before_them(run: Run) -> None:
    whole = reply(run("the man", "-t", "0", "-n", "30", "--json"))["text"]
    first, second = whole[10:12], whole[4:6]
    found = reply(run("the man", "-t", "0", "-n", "30", "--json", "--stop", first, "--stop", second))
    assert found["finish_reason"] == "stop"
    assert found["stop"] in (first, second)
    assert found["text"] == whole[: min(whole.index(first), whole.index(second))]


def test_logprobs_stand_in_the_json(run: Run) -> None:
    found = reply(run("the man", *GREEDY, "--json", "--logprobs", "3"))
    assert [entry["token"] for entry in found["logprobs"]] == found["tokens"]
    for entry in found["logprobs"]:
        assert len(entry["top"]) == 3
        assert entry["top"][0]["token"] == entry["token"]
        assert entry["logprob"] == pytest.approx(entry["top"][0]["logprob"])
        assert entry["top"][0]["logprob"] >= entry["top"][1]["logprob"]


def test_without_json_logprobs_and_timings_are_told_beside_the_text(run: Run) -> None:
    done = run("the man", *GREEDY, "--logprobs", "2", "-v")
    *chances, timing = done.stderr.splitlines()
    assert len(chances) == 8
    assert re.fullmatch(r"\d+ tokens read in [\d.]+ s \(\d+/s\), 8 written in .*, ended by length", timing)
    assert done.stdout == run("the man", *GREEDY).stdout


def test_samples_differ_and_the_first_is_that_of_one_alone(run: Run) -> None:
    arguments = ("the man", "-t", "1.2", "-n", "6", "--seed", "3")
    samples = reply(run(*arguments, "--samples", "6", "--json"))["samples"]
    assert len({tuple(sample["tokens"]) for sample in samples}) == 6
    assert samples[0]["tokens"] == reply(run(*arguments, "--json"))["tokens"]
    shown = run(*arguments, "--samples", "6").stdout
    expected = "".join(
        f"[{number} of 6]\n" + sample["text"] + ("" if sample["text"].endswith("\n") else "\n")
        for number, sample in enumerate(samples, 1)
    )
    assert shown == expected


def test_a_schema_shapes_the_reply(run: Run, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(
        json.dumps({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}).replace(
            '"required"', '"additionalProperties": false, "required"'
        )
    )
    done = run("the man", "--schema", str(schema), "--seed", "1")
    assert done.returncode == 0
    assert json.loads(done.stdout)["ok"] in (True, False)


def test_a_regex_shapes_the_reply(run: Run) -> None:
    assert re.fullmatch(r"[a-c]{3}-[0-9]{2}", run("the man", "--regex", "[a-c]{3}-[0-9]{2}").stdout.strip())


@pytest.mark.parametrize(
    ("name", "text"), [("g.lark", 'start: "yes" | "no"'), ("g.gbnf", 'root ::= "yes" | "no"')]
)
def test_a_grammar_shapes_the_reply(run: Run, tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert run("the man", "--grammar", str(path)).stdout in ("yes\n", "no\n")


def test_a_full_context_is_told(run: Run) -> None:
    done = run("the man", "--ctx", "40", "-t", "0")
    assert done.returncode == 0
    assert done.stderr == (
        "perdure: the context of 40 tokens is full, so the text ends here; a larger --ctx makes room\n"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["x", "--temperature", "-1"], "temperature is a number from 0"),
        (["x", "--top-p", "2"], "top_p is a number from 0 to 1, got 2.0"),
        (["x", "--seed", "-1"], "seed is None or a whole number"),
        (["x", "--stop", ""], "--stop needs a text"),
        (["x", "--regex", "("], "does not compile"),
        (["x", "--regex", "a", "--schema", "b"], "give one of --schema, --regex and --grammar"),
        (["x", "--schema", "/nowhere.json"], "/nowhere.json cannot be read: No such file or directory"),
        (["x", "--grammar", "/dev/null"], "/dev/null should end in .lark or .gbnf"),
        (["x" * 99, "--ctx", "20"], "19 fit into the context of 20; a larger --ctx makes room"),
        (["x" * 999, "--ctx", "20"], "the prompt has at least "),
        (["x", "--model", "/nowhere.gguf"], "there is no file /nowhere.gguf"),
        ([""], "the prompt is empty"),
    ],
    ids=lambda value: "-".join(value)[:20] if isinstance(value, list) else "",
)
def test_what_cannot_be_done_exits_with_1_and_plain_words(run: Run, arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("perdure: ")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["x", "--max-tokens", "0"],
        ["x", "--samples", "0"],
        ["x", "-c", "--session", "a"],
        # A variable of a shell that is not set: nothing would be kept.
        ["x", "--session", ""],
        ["x", "--raw", "--system", "a"],
        ["x", "--session", "a", "--samples", "2"],
    ],
)
def test_wrong_usage_exits_with_2(run: Run, arguments: list[str]) -> None:
    assert run(*arguments).returncode == 2


def test_standard_input_that_is_no_text_is_refused(environment: dict[str, str]) -> None:
    done = subprocess.run(COMMAND, env=environment, input=b"ab\xff", capture_output=True, check=False)
    assert done.returncode == 1
    assert done.stderr == b"perdure: standard input is not UTF-8 text (byte 2)\n"


# What is asked, and how.


def test_the_chat_template_is_applied_unless_the_text_is_raw(
    run: Run, zoo_path: Callable[[str], Path]
) -> None:
    """The answer is the one that the library gives to a user's message."""
    import perdure

    with perdure.open(zoo_path("llama"), n_ctx=512, slots=1) as rt:
        chat = rt.chat([{"role": "user", "content": "the man"}], temperature=0, max_tokens=8)
        plain = rt.generate("the man", temperature=0, max_tokens=8)
    assert reply(run("the", "man", *GREEDY, "--json"))["tokens"] == list(chat.raw.tokens)
    assert reply(run("the man", *GREEDY, "--json", "--raw"))["tokens"] == list(plain.tokens)


def test_a_base_model_says_that_it_has_no_template_and_completes(
    environment: dict[str, str], run: Run, zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    raw = reply(run("the man", *GREEDY, "--json", "--raw"))
    path = tmp_path / "base.gguf"
    data = zoo_path("llama").read_bytes()
    path.write_bytes(data.replace(b"tokenizer.chat_template", b"tokenizer.chat_nothing_"))
    done = run(str(path), "the man", *GREEDY, "--json")
    assert reply(done)["tokens"] == raw["tokens"]
    assert done.stderr == (
        "perdure: base.gguf has no chat template, so it completes the text as it is (--raw)\n"
    )
    done = run(str(path), "the man", *GREEDY, "--system", "Be terse.")
    assert (done.returncode, done.stdout) == (1, "")
    assert "base.gguf has no chat template" in done.stderr


def test_a_model_is_named_in_first_place(environment: dict[str, str], run: Run, tmp_path: Path) -> None:
    path = environment.pop("PERDURE_MODEL")
    expected = reply(run("-m", path, "the", "man", *GREEDY, "--json"))["tokens"]
    assert reply(run(path, "the", "man", *GREEDY, "--json"))["tokens"] == expected
    copy = tmp_path / "without-a-suffix"
    copy.write_bytes(Path(path).read_bytes())
    assert reply(run(str(copy), "the man", *GREEDY, "--json"))["tokens"] == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["llama3.2:90b", "hello"],
            "there is no model 'llama3.2:90b': did you mean llama3.2:1b or llama3.2:3b?",
        ),
        (["qwen9", "hi"], "there is no model 'qwen9'"),
        (["llama3", "why is the sky blue"], "there is no model 'llama3'"),
        (["/etc/hostname", "what is this"], "/etc/hostname is not a model; `-f /etc/hostname` attaches it"),
        (["https://example.org/page", "hello"], "not the address of a .gguf file"),
    ],
)
def test_what_was_meant_as_a_model_is_never_taken_for_a_prompt(
    run: Run, arguments: list[str], said: str
) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr


def test_files_and_standard_input_follow_the_prompt(run: Run, tmp_path: Path) -> None:
    one, two = tmp_path / "one.txt", tmp_path / "two.md"
    one.write_text("first\n")
    two.write_text("second\n")
    text = "Compare:\n\none.txt:\n```\nfirst\n```\n\ntwo.md:\n```\nsecond\n```\n\nthe rest"
    expected = reply(run(text, *GREEDY, "--json"))["usage"]
    done = run("Compare:", "-f", str(one), "-f", str(two), *GREEDY, "--json", pipe="the rest\n")
    assert reply(done)["usage"] == expected
    done = run("Compare:", "-f", str(tmp_path / "none"), *GREEDY)
    assert (done.returncode, done.stdout) == (1, "")
    assert "none cannot be read: No such file or directory" in done.stderr


def test_a_system_prompt_is_a_text_or_a_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "system.txt").write_text("Be terse.\n")
    plain = reply(run("the man", *GREEDY, "--json"))["usage"]
    said = reply(run("the man", *GREEDY, "--json", "-s", "Be terse."))
    assert said["usage"]["prompt_tokens"] > plain["prompt_tokens"]
    assert reply(run("the man", *GREEDY, "--json", "-s", f"@{tmp_path}/system.txt"))["usage"] == said["usage"]


def test_continue_goes_on_from_the_last_run_and_a_new_run_begins_anew(run: Run) -> None:
    first = reply(run("the man", *GREEDY, "--json"))
    second = reply(run("-c", "the other", *GREEDY, "--json"))
    assert second["session"] == "last-run"
    grown = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    assert second["usage"]["prompt_tokens"] > grown
    assert (
        reply(run("the man", *GREEDY, "--json"))["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"]
    )


def test_a_session_is_kept_by_its_name_and_is_the_one_that_continues(run: Run) -> None:
    reply(run("an earlier one", *GREEDY, "--json"))
    first = reply(run("the man", *GREEDY, "--json", "--session", "work"))
    second = reply(run("the other", *GREEDY, "--json", "--session", "work"))
    assert second["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"]
    assert reply(run("-c", "and now", *GREEDY, "--json"))["session"] == "work"


def test_nothing_to_continue_is_told_with_the_store(run: Run, tmp_path: Path) -> None:
    done = run("-c", "hello")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"there is no conversation to continue in {tmp_path / 'home' / 'store'}" in done.stderr
    assert run("hello", *GREEDY, "--no-keep").returncode == 0
    assert run("-c", "hello").returncode == 1


def test_without_streaming_the_same_text_comes_at_the_end(run: Run) -> None:
    assert run("the man", *GREEDY, "--no-stream").stdout == run("the man", *GREEDY).stdout


def test_in_a_terminal_a_model_alone_is_a_chat(environment: dict[str, str]) -> None:
    path = environment.pop("PERDURE_MODEL")
    with terminal({**environment, "TERM": "dumb"}, "run", path, "-n", "4", columns=80) as user:
        user.until("This conversation is not kept; /keep NAME keeps it.\n> ")
        user.type("\x04")
        assert user.leaves() == 0


ENDLESS = ["the man", "--ctx", "60000", "--regex", "[ab]{50000}"]
TRAINED = (
    "perdure: llama.gguf was trained on texts of up to 4096 tokens, and --ctx is 60000: what it writes "
    "beyond that may make no sense\n"
)
"""All that is said beside the text of these."""


def test_ctrl_c_exits_with_130_and_the_text_so_far(environment: dict[str, str]) -> None:
    with subprocess.Popen(
        [*COMMAND, *ENDLESS],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        text = running.stdout.read(3)
        running.send_signal(signal.SIGINT)
        text += running.stdout.read()
        assert running.stderr.read().decode() == TRAINED
        assert running.wait(60) == 130
    assert re.fullmatch(rb"[ab]+\n", text)


def test_ctrl_c_with_json_prints_the_object_of_what_there_is(environment: dict[str, str]) -> None:
    code = f"""
import os, signal, sys, threading, time

def press():
    while signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=press, daemon=True).start()
sys.argv = ["perdure", "run", *{ENDLESS!r}, "--json"]
from perdure.cli import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, TRAINED)
    found = json.loads(done.stdout)
    assert found["finish_reason"] == "cancelled"
    assert set(found["text"]) <= set("ab")


def test_a_reader_that_goes_away_ends_it_quietly(environment: dict[str, str]) -> None:
    with subprocess.Popen(
        [*COMMAND, *ENDLESS],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.read(3)
        running.stdout.close()
        assert running.stderr.read().decode() == TRAINED
        assert running.wait(60) == 1


def test_a_first_word_that_names_a_model_is_the_model_and_that_is_said(
    environment: dict[str, str], run: Run, tmp_path: Path
) -> None:
    """With Ollama's file of that name, which is run where it lies."""
    path = environment.pop("PERDURE_MODEL")
    expected = reply(run("-m", path, "hi", *GREEDY, "--json"))["tokens"]
    environment["OLLAMA_MODELS"] = str(tmp_path / "ollama")
    put_ollama(tmp_path / "ollama", "tinyllama", Path(path).read_bytes())
    done = run("tinyllama", "hi", *GREEDY, "--json")
    assert reply(done)["tokens"] == expected
    assert "tinyllama is taken as the model" in done.stderr
    assert "is taken as the model" not in run("-m", path, "tinyllama", "hi", *GREEDY).stderr


def test_a_first_word_that_is_nearly_a_models_name_is_told(run: Run) -> None:
    """No wrong model in silence: it answers, and says which name was perhaps meant."""
    done = run("lama3.2", "hi", *GREEDY)
    assert done.returncode == 0
    assert "lama3.2 is part of the prompt; a model of nearly that name is llama3.2" in done.stderr
    for words in (["Name", "3", "cities"], ["2026", "is", "a", "year"], ["lama3.2 hi"]):
        assert "nearly that name" not in run(*words, *GREEDY).stderr


def test_after_the_demos_first_answer_one_line_says_what_it_is(
    environment: dict[str, str], run: Run, tmp_path: Path
) -> None:
    demo = tmp_path / str(MODELS[DEFAULT].file)
    demo.write_bytes(Path(environment["PERDURE_MODEL"]).read_bytes())
    environment["PERDURE_MODEL"] = str(demo)
    first = run("hi", *GREEDY)
    assert first.returncode == 0
    assert re.search(r"this was the demo model, .*`perdure models` lists others", first.stderr)
    assert "demo" not in first.stdout
    assert "demo" not in run("hi", *GREEDY).stderr
