"""`perdure chat`, from a pipe and in a terminal."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from cli.pty_user import COMMAND, PATIENCE, PtyUser, piped, plain, terminal, terminal_environment
from homes import new_home
from perdure.sessions.sessions import Sessions

GREEDY = ("-t", "0")
BRIEF = (*GREEDY, "--max-tokens", "6")
"""At temperature 0 the toy model repeats itself for ever."""
UNICODE = "é 한국 🙂"


@pytest.fixture
def environment(zoo_path: Callable[[str], Path], tmp_path: Path) -> dict[str, str]:
    return terminal_environment(zoo_path("llama"), tmp_path / "home", term="dumb")


def shown(environment: dict[str, str], session: str) -> dict[str, Any]:
    """What is kept of a session, as the command tells it."""
    done = piped(environment, "", "sessions", "show", session, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def held_to(folder: Path, reply: str) -> tuple[str, str]:
    """The option that makes every reply this text, in quotes."""
    path = folder / "schema.json"
    path.write_text(json.dumps({"const": reply}))
    return "--schema", str(path)


def thinking(folder: Path) -> tuple[str, str]:
    """The option for a template that opens reasoning before every reply."""
    path = folder / "thinking.jinja"
    path.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n<think>\n"
    )
    return "--template", str(path)


# From a pipe.


def test_help_lists_every_option(environment: dict[str, str]) -> None:
    done = piped({**environment, "COLUMNS": "200"}, "", "chat", "--help")
    assert done.returncode == 0
    wanted = "model session store system ctx overflow template schema temperature seed"
    assert set(re.findall(r"--([a-z-]+)", done.stdout)) >= set(wanted.split())


def test_each_line_of_a_pipe_is_answered_and_the_second_depends_on_the_first(
    environment: dict[str, str],
) -> None:
    settings = ("chat", "-t", "3", "--seed", "1", "--max-tokens", "12")
    both = piped(environment, "the man\n\nthe other\n", *settings)
    assert (both.returncode, both.stderr) == (0, "")
    first = piped(environment, "the man\n", *settings)
    second = piped(environment, "the other\n", *settings)
    assert both.stdout.startswith(first.stdout)
    assert len(both.stdout) > len(first.stdout)
    assert both.stdout != first.stdout + second.stdout


def test_a_seed_repeats_and_a_system_message_matters(environment: dict[str, str]) -> None:
    seeded = ("chat", "--seed", "4", "-t", "1", "--max-tokens", "20")
    first = piped(environment, "the man\n", *seeded)
    assert piped(environment, "the man\n", *seeded).stdout == first.stdout != ""
    assert piped(environment, "the man\n", *seeded, "--system", "you are").stdout != first.stdout


def test_the_model_may_be_named_by_itself_but_only_once(
    environment: dict[str, str], zoo_path: Callable[[str], Path]
) -> None:
    path = environment.pop("PERDURE_MODEL")
    assert piped(environment, "the man\n", "chat", path, *BRIEF).returncode == 0
    assert piped(environment, "the man\n", "chat", path, "--model", path).returncode == 2


def test_replies_keep_to_a_schema_and_any_text_comes_whole(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """C9."""
    done = piped(environment, f"{UNICODE}\n", "chat", *held_to(tmp_path, UNICODE))
    assert (done.returncode, done.stdout, done.stderr) == (0, f'"{UNICODE}"\n', "")


def test_bytes_that_are_no_text_are_answered_all_the_same(environment: dict[str, str]) -> None:
    done = piped(environment, b"\xff\xfe\x80\n", "chat", *BRIEF)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba", "jamba"])
def test_a_conversation_goes_on_in_another_process_as_in_the_same(
    environment: dict[str, str], zoo_path: Callable[[str], Path], name: str
) -> None:
    """W≡C: the second answer is the same whether its first turn is in the cache or comes from the disk."""
    environment["PERDURE_MODEL"] = str(zoo_path(name))
    settings = ("chat", "--seed", "3", "-t", "2", "--max-tokens", "8")
    one = piped(environment, "the man\nthe other\n", *settings, "--session", "one")
    first = piped(environment, "the man\n", *settings, "--session", "two")
    second = piped(environment, "the other\n", *settings, "--session", "two")
    assert (one.returncode, first.returncode, second.returncode) == (0, 0, 0)
    assert one.stdout == first.stdout + second.stdout
    assert first.stderr == ""
    assert re.fullmatch(r"two: 1 turn, \d+ tokens; woken in .*: .*\d+ from disk.*\.\n", second.stderr)


@pytest.mark.parametrize(
    ("length", "count"), [(1_000, r"1\d{3}"), (45_000, r"at least \d{4}")], ids=["counted", "far-too-long"]
)
def test_a_message_too_long_is_told_nothing_is_lost_and_the_next_is_answered(
    environment: dict[str, str], length: int, count: str
) -> None:
    """C3: overflow is a visible line, before any work, and nothing is cut. C1: the turn never was."""
    asked = ("chat", "--ctx", "256", *BRIEF, "--session", "full")
    done = piped(environment, "the man\n" + "x" * length + "\nthe other\n", *asked)
    assert done.returncode == 1
    assert re.fullmatch(
        rf"perdure: with this message the conversation has {count} tokens, but 255 fit\. "
        r"It was not sent\. .*\n",
        done.stderr,
    )
    alone = piped(environment, "the man\nthe other\n", "chat", "--ctx", "256", *BRIEF)
    assert done.stdout == alone.stdout != ""
    kept = shown(environment, "full")
    assert [turn["messages"][0]["content"] for turn in kept["history"]] == ["the man", "the other"]


def test_a_reply_that_the_context_cuts_off_is_told(environment: dict[str, str]) -> None:
    done = piped(environment, "the man\n", "chat", "--ctx", "64", *GREEDY)
    assert done.returncode == 1
    assert "the context of 64 tokens is full, so the reply ends here" in done.stderr


@pytest.mark.parametrize(
    ("policy", "model", "line"),
    [
        ("drop_oldest", "llama", r"The oldest \d+ messages had to be left out of the prompt\."),
        ("shift", "llama", r"The oldest \d+ (messages|tokens) had to be left out"),
        # Only a summary that came to its end is taken.
        (
            "fold",
            "llama-brief",
            r"The conversation was full: a summary and its last turns stand for it now\.",
        ),
    ],
)
def test_a_policy_lets_a_conversation_go_on_and_says_what_it_did(
    environment: dict[str, str], zoo_path: Callable[[str], Path], policy: str, model: str, line: str
) -> None:
    """C4: thirty turns at 256 tokens."""
    environment["PERDURE_MODEL"] = str(zoo_path(model))
    asked = ("chat", "--ctx", "256", "--overflow", policy, *GREEDY, "--max-tokens", "16")
    messages = "".join(f"tell me about number {number}\n" for number in range(30))
    done = piped(environment, messages, *asked, "--session", "long")
    assert done.returncode == 0, done.stderr
    assert re.search(line, done.stderr), done.stderr
    assert done.stderr.count("\n") <= 30
    said = [turn for turn in shown(environment, "long")["history"] if turn["kind"] == "turn"]
    assert [turn["messages"][0]["content"] for turn in said] == messages.splitlines()


def test_a_fold_without_a_whole_summary_is_told_with_what_to_do_and_loses_nothing(
    environment: dict[str, str],
) -> None:
    """This model never comes to an end, so no summary of its is whole."""
    asked = ("chat", "--ctx", "256", "--overflow", "fold", *GREEDY, "--max-tokens", "16")
    messages = "".join(f"tell me about number {number}\n" for number in range(10))
    done = piped(environment, messages, *asked, "--session", "long")
    assert done.returncode == 1
    assert "not finished within 32 tokens: nothing was folded, and nothing is lost." in done.stderr
    assert "a larger context than 256 tokens" in done.stderr
    assert "drop_oldest" in done.stderr
    history = shown(environment, "long")["history"]
    kept = [turn["messages"][0]["content"] for turn in history if turn["kind"] == "turn"]
    assert kept
    assert kept == messages.splitlines()[: len(kept)]
    assert not any(turn["kind"] == "fold" for turn in history)


def test_a_conversation_that_fills_up_is_refused_without_a_policy(environment: dict[str, str]) -> None:
    """C4: nothing is dropped that nobody asked for."""
    messages = "tell me about it\n" * 30
    done = piped(environment, messages, "chat", "--ctx", "256", *GREEDY, "--max-tokens", "16")
    assert done.returncode == 1
    assert done.stderr.count("It was not sent.") > 5
    assert "left out of the prompt" not in done.stderr


def test_a_model_without_a_template_is_refused_and_another_template_helps(
    environment: dict[str, str], zoo_path: Callable[[str], Path], tmp_path: Path
) -> None:
    data = zoo_path("llama").read_bytes()
    path = tmp_path / "plain.gguf"
    path.write_bytes(data.replace(b"tokenizer.chat_template", b"tokenizer.chat_nothing_"))
    environment["PERDURE_MODEL"] = str(path)
    done = piped(environment, "hi\n", "chat")
    assert (done.returncode, done.stdout) == (1, "")
    assert "this model brings no chat template" in done.stderr
    assert "Traceback" not in done.stderr
    done = piped(environment, "hi\n", "chat", "--template", "chatml", *BRIEF)
    assert (done.returncode, done.stderr) == (0, "")
    done = piped(environment, "hi\n", "chat", "--template", "nonsense")
    assert done.returncode == 1
    assert "nonsense cannot be read" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--store", "there"), 2, "--session NAME"),
        (("--overflow", "sometimes"), 2, "sometimes"),
        (("--temperature", "-1"), 1, "temperature"),
        (("--schema", "missing.json"), 1, "missing.json cannot be read"),
        (("--session", ""), 2, "a session needs a name that is not empty"),
    ],
)
def test_a_wrong_option_is_told_in_plain_words(
    environment: dict[str, str], arguments: tuple[str, ...], code: int, words: str
) -> None:
    done = piped(environment, "hi\n", "chat", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_another_system_message_is_refused_for_a_session_that_has_one(environment: dict[str, str]) -> None:
    asked = ("chat", *BRIEF, "--session", "terse", "--system")
    assert piped(environment, "hi\n", *asked, "Be terse.").returncode == 0
    assert piped(environment, "hi\n", *asked, "Be terse.").returncode == 0
    done = piped(environment, "hi\n", *asked, "Be long.")
    assert (done.returncode, done.stdout) == (1, "")
    assert "has another system message" in done.stderr


def test_reasoning_is_hidden_with_one_note(environment: dict[str, str], tmp_path: Path) -> None:
    done = piped(environment, "hi\nthere\n", "chat", *BRIEF, *thinking(tmp_path))
    assert done.returncode == 0
    assert done.stdout.strip() == ""
    assert done.stderr == "(The model has reasoned first; that is not shown.)\n"


def test_a_reader_that_goes_away_ends_it_quietly(environment: dict[str, str]) -> None:
    with subprocess.Popen(
        [*COMMAND, "chat", *GREEDY, "--ctx", "3000"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdin.write(b"the man\n")
        running.stdin.flush()
        running.stdout.read(1)
        running.stdout.close()
        assert running.wait(PATIENCE) == 1
        assert b"Traceback" not in running.stderr.read()


def test_ctrl_c_with_a_pipe_exits_with_130_and_keeps_what_came(environment: dict[str, str]) -> None:
    """C1: a stated partial turn."""
    with subprocess.Popen(
        [*COMMAND, "chat", *GREEDY, "--ctx", "3000", "--session", "cut"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        running.stdin.write(b"the man\n")
        running.stdin.flush()
        running.stdout.read(1)
        running.send_signal(signal.SIGINT)
        assert running.wait(PATIENCE) == 130
    [turn] = shown(environment, "cut")["history"]
    assert turn["finish_reason"] == "cancelled"
    assert turn["reply"]["content"]


OFFER = r"\[C\]ontinue it, \[a\]sk again, \[d\]iscard it, or \[l\]eave it\? "


ENDING = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])


@ENDING
@pytest.mark.parametrize("command", ["chat", "run"])
def test_y23_a_plain_kill_keeps_what_came_as_ctrl_c_does(
    environment: dict[str, str], command: str, number: signal.Signals
) -> None:
    """Y23: the message and the part of its reply, and the exit code that tells the signal."""
    with subprocess.Popen(
        [*COMMAND, command, *GREEDY, "--ctx", "3000", "--session", "cut"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdin.write(b"the man\n")
        running.stdin.flush()
        if command == "run":
            running.stdin.close()
        running.stdout.read(1)
        running.send_signal(number)
        assert running.wait(PATIENCE) == 128 + number
        assert b"Traceback" not in running.stderr.read()
    kept = shown(environment, "cut")
    if command == "run":
        [turn] = kept["history"]
        assert turn["finish_reason"] == "cancelled"
    else:
        # A chat that is opened again offers to continue it (C12).
        turn = kept["pending"]
        assert turn["ended"] == "the chat was ended"
    assert turn["messages"][0]["content"].strip() == "the man"
    assert turn["reply"]["content"]


# In a terminal.


@pytest.mark.parametrize("how", ["kill", "hang up"])
def test_y23_a_chat_whose_window_is_closed_keeps_what_came(environment: dict[str, str], how: str) -> None:
    """Y23: also where the window is gone when the rest is to be shown."""
    with terminal(environment, "chat", "--ctx", "3000", *GREEDY, "--session", "cut") as user:
        user.until("> ")
        user.type("the man\n")
        user.until("the man\n.")
        if how == "hang up":
            user.hang_up()
        else:
            user.process.send_signal(signal.SIGTERM)
            user.leaves()
        assert user.process.wait(PATIENCE) == 128 + (signal.SIGHUP if how == "hang up" else signal.SIGTERM)
    pending = shown(environment, "cut")["pending"]
    assert (pending["ended"], pending["messages"][0]["content"]) == ("the chat was ended", "the man")
    part = pending["reply"]["content"]
    assert part
    with terminal(environment, "chat", *BRIEF, "--session", "cut") as user:
        offered = user.until(OFFER)
        assert "The reply to this was interrupted (the chat was ended):\nthe man\nSo far:\n" in offered
        user.type("l\n")
        user.until("another message keeps both.*cut> ")
        assert "Discarded." in ask(user, "/discard", "cut> ")
        assert "nothing to discard" in ask(user, "/discard", "cut> ")
        assert "no pending turn" in ask(user, "/continue", "cut> ")
        user.type("\x04")
        assert user.leaves() == 0
    assert shown(environment, "cut")["pending"] is None


def ask(user: PtyUser, text: str, until: str = r"\n[^\n]*> ") -> str:
    """Type a line, and read up to the next prompt."""
    user.type(f"{text}\n")
    user.until(re.escape(text.replace("\t", "")))
    return user.until(until)


def test_in_a_terminal_ctrl_c_stops_a_reply_and_keeps_it_and_the_conversation(
    environment: dict[str, str],
) -> None:
    """C1: what came is a partial turn, and the next message goes on from it."""
    with terminal(environment, "chat", "--ctx", "3000", *GREEDY, "--session", "cut") as user:
        user.until("> ")
        user.type("the man\n")
        user.until("the man\n.")
        user.type("\x03")
        assert "full" not in user.until("Stopped; what there is of it is kept\\.\ncut> ")
        assert "There is no /nonsense; /help tells what there is." in ask(user, "/nonsense")
        assert "/regen" in ask(user, "/help", "cut> ")
        for _ in range(2):
            # Seen first: a key that comes while the prompt is being drawn may be lost.
            user.type("half a line")
            user.until("half a line")
            user.type("\x03")
            user.until("Ctrl-D or /quit leaves.\ncut> ")
        user.type("/quit\n")
        assert user.leaves() == 0
    [turn] = shown(environment, "cut")["history"]
    assert (turn["finish_reason"], turn["messages"][0]["content"]) == ("cancelled", "the man")
    assert turn["reply"]["content"]


def test_in_a_terminal_overflow_is_a_visible_line_and_ctrl_d_leaves(environment: dict[str, str]) -> None:
    """C3: 45 KB pasted at 256 tokens; nothing is lost, and the next message is answered."""
    environment["TERM"] = "xterm"
    with terminal(environment, "chat", "--ctx", "256", *BRIEF, "--session", "full") as user:
        user.until("> ")
        ask(user, "the man")
        user.paste("word " * 9_000)
        user.type("\n")
        user.until(r"perdure: with this message the conversation has at least \d{4} tokens, but 255 fit")
        user.until("> ")
        assert "perdure:" not in ask(user, "the other")
        user.type("\x04")
        assert user.leaves() == 0
    kept = shown(environment, "full")["history"]
    assert [turn["messages"][0]["content"] for turn in kept] == ["the man", "the other"]


def test_in_a_terminal_the_latest_of_many_sessions_are_listed(
    environment: dict[str, str], tmp_path: Path
) -> None:
    with Sessions(tmp_path / "many") as made:
        for number in range(40):
            made.open(f"s{number}")
    with terminal(environment, "chat", *BRIEF, "--session", "a", "--store", str(tmp_path / "many")) as user:
        user.until("a> ")
        listed = ask(user, "/sessions", "a> ")
    assert re.findall(r" (s\d+)\n", listed) == [f"s{number}" for number in range(39, 10, -1)]
    assert "These are the latest 30; `perdure sessions ls` lists all of them." in listed


def test_in_a_terminal_a_conversation_is_forked_rewound_edited_and_saved(
    environment: dict[str, str], tmp_path: Path
) -> None:
    with terminal(environment, "chat", *BRIEF, "--session", "a") as user:
        user.until("a> ")
        ask(user, "the man")
        ask(user, "the other")
        assert "Now in b, a copy; a stays as it is." in ask(user, "/fork b", "b> ")
        assert "there is a session 'b' already" in ask(user, "/fork b", "b> ")
        assert "Back by 1 turn; 1 turn left." in ask(user, "/rewind", "b> ")
        assert "/rewind 9 goes back too far: this conversation has 1 turn" in ask(user, "/rewind 9", "b> ")
        told = ask(user, "/edit 1 a woman", "b> ")
        assert "What was said before is kept as b~2; /sessions b~2 goes there." in told
        ask(user, "and then", "b> ")
        ask(user, "/edit and now", "b> ")
        ask(user, "/regen", "b> ")
        stats = ask(user, "/stats", r"seed \d+\nb> ")
        assert "session  b, 2 turns," in stats
        assert re.search(r"prompt +(\d+ (still in the engine|from memory|from disk), )+\d+ computed", stats)
        listed = ask(user, "/sessions", "b> ")
        assert re.search(r"\* +2 turns .* b\n", listed)
        assert re.search(r"\n? +2 turns .* a\n", listed)
        branches = ask(user, "/branches", "b> ")
        assert re.search(r"\* +2 turns .* b\n", branches)
        assert re.search(r"1 turn .* b~2\n", branches)
        assert " a\n" not in branches
        assert "b is called Our Plans in lists." in ask(user, "/rename Our Plans", "b> ")
        assert re.search(r"\* +2 turns .* b  Our Plans\n", ask(user, "/search our plans", "b> "))
        said = ask(user, "/search the other", "b> ")
        assert " a\n" in said
        assert " b~2\n" not in said
        assert "No session has nowhere said." in ask(user, "/search nowhere said", "b> ")
        assert re.search(r"a: 2 turns, \d+ tokens; woken in", ask(user, "/sessions a", "a> "))
        assert "there is no session 'c'" in ask(user, "/sessions c", "a> ")
        for name in ("talk.md", "talk.jsonl", "talk.session"):
            ask(user, f"/save {tmp_path / name}", r"Saved to .*a> ")
        assert "exists already" in ask(user, f"/save {tmp_path / 'talk.md'}", "a> ")
        assert re.search(r"Asleep in .*\d+ from disk", ask(user, "/sleep", "a> "))
        ask(user, "are you awake", "a> ")
        assert "Now in a-2; a stays as it is." in ask(user, "/system Be terse.", "a-2> ")
        ask(user, "hello", "a-2> ")
        assert "Now in a-2-2; a-2 stays as it is." in ask(user, "/reset", "a-2-2> ")
        user.type("/quit\n")
        assert user.leaves() == 0
    assert [turn["messages"][0]["content"] for turn in shown(environment, "b")["history"]] == [
        "a woman",
        "and now",
    ]
    assert [turn["messages"][0]["content"] for turn in shown(environment, "a")["history"]] == [
        "the man",
        "the other",
        "are you awake",
    ]
    assert (shown(environment, "a-2")["system"], shown(environment, "a-2")["turns"]) == ("Be terse.", 1)
    assert (shown(environment, "a-2-2")["system"], shown(environment, "a-2-2")["turns"]) == ("Be terse.", 0)
    assert "the other" in (tmp_path / "talk.md").read_text()
    lines = [json.loads(line) for line in (tmp_path / "talk.jsonl").read_text().splitlines()]
    assert [line["role"] for line in lines] == ["user", "assistant"] * 2
    home = {**environment, "PERDURE_HOME": str(new_home(tmp_path / "elsewhere"))}
    brought = ("sessions", "import", str(tmp_path / "talk.session"), "--json")
    plain = json.loads(piped(home, "", *brought, "--as", "c").stdout)
    assert (plain["tiers"], plain["taken"]["state_tokens"]) == ({}, 0)
    assert "another store wrote it" in plain["left_out"]["state"]
    trusted = json.loads(piped(home, "", *brought, "--as", "d", "--trust-state").stdout)
    assert trusted["left_out"] == {}
    assert trusted["tiers"].get("disk", 0) + trusted["tiers"].get("memory", 0)


DROP = r"is not saved\. Name to save it under, or n to discard: "


def drop(user: PtyUser, conversations: int = 1) -> None:
    """Leave a chat that is not kept, and do not keep it."""
    user.type("\x04")
    for _ in range(conversations):
        user.until(DROP)
        user.type("n\n")
    assert user.leaves() == 0


def test_without_a_name_nothing_is_kept_and_there_are_sessions_all_the_same(
    environment: dict[str, str],
) -> None:
    with terminal(environment, "chat", *BRIEF) as user:
        user.until("This conversation is not kept; /keep NAME keeps it.\n> ")
        ask(user, "the man", "\n> ")
        assert "not kept on disk: /keep NAME keeps it" in ask(user, "/sleep", "\n> ")
        told = ask(user, "/fork b", r"b \(not kept\)> ")
        assert "Neither is kept; /keep NAME keeps this one." in told
        ask(user, "the other", r"b \(not kept\)> ")
        assert "chat: 1 turn," in ask(user, "/sessions chat", "\n> ")
        told = ask(user, "/system Be terse.", r"chat-2 \(not kept\)> ")
        assert "Now in chat-2; chat stays as it is." in told
        assert "nothing was answered yet" in ask(user, "/stats", r"\nchat-2 \(not kept\)> ")
        assert "Be terse." in ask(user, "/system", r"chat-2 \(not kept\)> ")
        drop(user, conversations=2)
    assert not (Path(environment["PERDURE_HOME"]) / "store").exists()


def test_a_chat_is_kept_by_a_command_and_goes_on_there(environment: dict[str, str]) -> None:
    with terminal(environment, "chat", *BRIEF) as user:
        user.until("\n> ")
        ask(user, "the man", "\n> ")
        told = ask(user, "/keep work", "work> ")
        assert "`perdure chat --session work` continues it." in told
        ask(user, "the other", "work> ")
        assert "is kept as 'work' already" in ask(user, "/keep work", "work> ")
        user.type("\x04")
        assert user.leaves() == 0
    said = [turn["messages"][0]["content"] for turn in shown(environment, "work")["history"]]
    assert said == ["the man", "the other"]
    with terminal(environment, "chat", *BRIEF, "--session", "work") as user:
        user.until("work: 2 turns,.*work> ")
        ask(user, "and now", "work> ")


def test_leaving_a_chat_offers_to_keep_it(environment: dict[str, str]) -> None:
    with terminal(environment, "chat", *BRIEF, "--session", "taken") as user:
        user.until("taken> ")
        user.type("\x04")
        assert user.leaves() == 0
    with terminal(environment, "chat", *BRIEF) as user:
        user.until("\n> ")
        ask(user, "the man", "\n> ")
        user.type("/bye\n")
        user.until(r"This conversation \(1 turn\) " + DROP)
        user.type("taken\n")
        user.until("there is a session 'taken' already.*" + DROP)
        user.type("mine\n")
        user.until("Kept as mine in ")
        assert user.leaves() == 0
    assert shown(environment, "mine")["turns"] == 1


def test_a_chat_shows_its_history_takes_back_and_has_settings(environment: dict[str, str]) -> None:
    with terminal(environment, "chat", *BRIEF, "--session", "a") as user:
        user.until("a> ")
        assert "There is no /histroy; did you mean /history?" in ask(user, "/histroy", "a> ")
        assert "Nothing was said yet." in ask(user, "/history", "a> ")
        assert "there is nothing to take back yet" in ask(user, "/undo", "a> ")
        ask(user, "the man", "a> ")
        ask(user, "the other", "a> ")
        told = ask(user, "/history", "a> ")
        assert "1  user: the man\n" in told
        assert "2  user: the other\n" in told
        assert "Took back: the other" in ask(user, "/undo", "a> ")
        assert "the other" not in ask(user, "/history", "a> ")
        assert re.search(r"temperature +0.0 +\(set\)", ask(user, "/set", "a> "))
        assert "top_k is 1 from the next reply on." in ask(user, "/set top-k 1", "a> ")
        assert "top_k is 40 from the next reply on." in ask(user, "/set top_k default", "a> ")
        assert "temperature is a number from 0 to 100, got 'hot'" in ask(user, "/set temperature hot", "a> ")
        assert "temperature is a number from 0" in ask(user, "/set temperature -1", "a> ")
        assert "there is no setting 'heat'" in ask(user, "/set heat 1", "a> ")
        assert "'temprature'; did you mean temperature?" in ask(user, "/set temprature 1", "a> ")
        ask(user, "/set max_tokens 2", "a> ")
        assert "(Cut at the limit of 2 tokens; /set max_tokens changes it.)" in ask(user, "and now", "a> ")
        user.type("\x04")
        assert user.leaves() == 0
    assert shown(environment, "a")["history"][-1]["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("kept", [(), ("--session", "a")], ids=["in-memory", "kept"])
def test_the_model_is_changed_within_a_conversation(
    environment: dict[str, str], zoo_path: Callable[[str], Path], tmp_path: Path, kept: tuple[str, ...]
) -> None:
    (tmp_path / "base.gguf").write_bytes(
        zoo_path("llama").read_bytes().replace(b"tokenizer.chat_template", b"tokenizer.chat_nothing_")
    )
    end = "a> " if kept else "\n> "
    with terminal(environment, "chat", *BRIEF, *kept) as user:
        user.until(end)
        ask(user, "the man", end)
        assert "llama.gguf; /model NAME changes" in ask(user, "/model", end)
        assert "there is no file" in ask(user, "/model nowhere.gguf", end)
        assert "has no chat template" in ask(user, f"/model {tmp_path / 'base.gguf'}", end)
        assert "Now with gemma3.gguf." in ask(user, f"/model {zoo_path('gemma3')}", end)
        ask(user, "the other", end)
        told = ask(user, "/history", end)
        assert "1  user: the man" in told
        assert "2  user: the other" in told


def test_a_first_message_can_be_given_with_the_command(environment: dict[str, str]) -> None:
    with terminal(environment, "chat", *BRIEF, "--session", "a", "the", "man") as user:
        user.until("a> ")
        user.type("\x04")
        assert user.leaves() == 0
    [turn] = shown(environment, "a")["history"]
    assert turn["messages"][0]["content"] == "the man"


def test_what_is_typed_during_a_reply_waits_for_its_turn_and_is_not_shown_in_it(
    environment: dict[str, str], tmp_path: Path
) -> None:
    environment["TERM"] = "xterm"
    # A reply that goes on until the context is full, whatever a CPU makes of the toy's likeliest token.
    endless = held_to(tmp_path, "and on " * 700)
    with terminal(environment, "chat", "--ctx", "600", *GREEDY, *endless, "--session", "a") as user:
        user.until("a> ")
        user.type("the man\n")
        user.until("the man\n.*[a-z]")
        user.type("typed meanwhile\n")
        reply = user.until("the context of 600 tokens is full")
        assert "typed meanwhile" not in reply
        user.until("a> .*typed meanwhile\n.*It was not sent.*a> ")


def test_earlier_messages_are_found_with_ctrl_r(environment: dict[str, str]) -> None:
    environment["TERM"] = "xterm"
    with terminal(environment, "chat", *BRIEF, "--session", "a") as user:
        user.until("a> ")
        ask(user, "a needle here", "a> ")
        ask(user, "something else", "a> ")
        user.type("\x12need")
        user.until("a needle here")
        # As the key does: a line feed would only end the search.
        user.type("\r")
        user.until("a> ")
        user.type("\x04")
        assert user.leaves() == 0
    said = [turn["messages"][0]["content"] for turn in shown(environment, "a")["history"]]
    assert said == ["a needle here", "something else", "a needle here"]


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (120, 40)])
def test_help_and_messages_break_between_words_at_the_width_of_the_window(
    environment: dict[str, str], columns: int, rows: int
) -> None:
    environment["TERM"] = "xterm"
    asked = ("chat", *BRIEF, "--ctx", "256", "--session", "a")
    with terminal(environment, *asked, columns=columns, rows=rows) as user:
        user.until("a> ")
        told = plain(ask(user, "/help", "a> ")).splitlines()[1:-1]
        assert max(cell_len(line) for line in told) < columns
        assert [line.split()[0] for line in told if not line.startswith(" ")][:2] == ["/help", "/keep"]
        user.type("x" * 600 + "\n")
        user.until("perdure: ")
        refused = plain(user.until(r"It\s+was.*more\s+fit\n.*a> ")).splitlines()[1:-1]
        assert max(cell_len(line) for line in refused) < columns


def test_what_was_typed_comes_back_with_the_arrow_keys_in_the_next_run(environment: dict[str, str]) -> None:
    environment["TERM"] = "xterm"
    with terminal(environment, "chat", *BRIEF) as user:
        user.until("> ")
        ask(user, "the man who remembers")
        drop(user)
    with terminal(environment, "chat", *BRIEF) as user:
        user.until("> ")
        user.type("\x1b[A\x1b[A")
        user.until("the man who remembers")
        user.type("\x04")


def test_a_message_has_several_lines_by_a_backslash_by_quotes_or_pasted(environment: dict[str, str]) -> None:
    environment["TERM"] = "xterm"
    with terminal(environment, "chat", *BRIEF, "--session", "lines") as user:
        user.until("> ")
        user.type("one\\\n")
        user.until("… ")
        user.type("two\n")
        user.until("lines> ")
        user.type("first\x1b\r")
        user.until("… ")
        user.type("second\n")
        user.until("lines> ")
        user.type('"""/three\n')
        user.until("… ")
        user.type('four"""\n')
        user.until("lines> ")
        user.paste("five\nsix")
        user.type("\n")
        user.until("six.*lines> ")
        ask(user, "//seven")
        user.type("\x04")
        assert user.leaves() == 0
    kept = shown(environment, "lines")["history"]
    assert [turn["messages"][0]["content"] for turn in kept] == [
        "one\ntwo",
        "first\nsecond",
        "/three\nfour",
        "five\nsix",
        "/seven",
    ]


def test_any_letters_can_be_typed_and_are_shown(environment: dict[str, str], tmp_path: Path) -> None:
    """C9: typed, echoed, answered and kept."""
    environment["TERM"] = "xterm"
    asked = ("chat", "--session", UNICODE, *held_to(tmp_path, f"{UNICODE} ok"))
    with terminal(environment, *asked) as user:
        user.until(f"{UNICODE}> ")
        user.type(f"{UNICODE}\n")
        user.until(f'{UNICODE}.*"{UNICODE} ok"\n.*> ')
        user.type("\x04")
        assert user.leaves() == 0
    [turn] = shown(environment, UNICODE)["history"]
    assert turn["messages"][0]["content"] == UNICODE
    assert turn["reply"]["content"] == f'"{UNICODE} ok"'


WORDS = "some **bold words** and `a bit of code` that go on for longer than a narrow window is wide"


def test_in_a_narrow_window_words_stay_whole_and_marks_become_styles(
    environment: dict[str, str], tmp_path: Path
) -> None:
    environment["TERM"] = "xterm"
    with terminal(environment, "chat", *held_to(tmp_path, WORDS), "--session", "w", columns=20) as user:
        user.until("> ")
        user.type("go\n")
        reply = user.until('"some.*wide"\n').rpartition('"some')[2]
        user.until("> ")
        user.type("\x04")
        assert user.leaves() == 0
    assert "\x1b[0;1mbold" in reply
    lines = plain(reply).splitlines()
    assert max(cell_len(line) for line in lines) <= 20
    assert " ".join(lines) == WORDS.removeprefix("some").replace("**", "").replace("`", "") + '"'


@pytest.mark.parametrize("without", [{"NO_COLOR": "1", "TERM": "xterm"}, {"TERM": "dumb"}])
def test_without_colours_a_reply_is_the_text_as_it_is(
    environment: dict[str, str], tmp_path: Path, without: dict[str, str]
) -> None:
    with terminal(environment | without, "chat", *held_to(tmp_path, WORDS), "--session", "w") as user:
        user.until("> ")
        user.type("go\n")
        assert WORDS in user.until(f'"{re.escape(WORDS)}"\n')
        # A key that is pressed before the prompt is there may be lost.
        user.until("> ")
        user.type("\x04")
        assert user.leaves() == 0


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_reasoning_is_shown_when_asked_for(environment: dict[str, str], tmp_path: Path, term: str) -> None:
    environment["TERM"] = term
    with terminal(environment, "chat", *BRIEF, *thinking(tmp_path)) as user:
        user.until("> ")
        assert "/think show shows it" in ask(user, "the man", "shows it.*\n> ")
        ask(user, "/think show", "\n.*> ")
        told = ask(user, "the other", "\n> " if term == "dumb" else "\n\n.*> ")
        assert ("\x1b[2m" in told) if term == "xterm" else ("(thinking)\n" in told)
        assert "/think show, or /think hide" in ask(user, "/think aloud")
        drop(user)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_chat_without_a_name_leaves_nothing_behind_when_it_is_ended(
    environment: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    with terminal({**environment, "TMPDIR": str(folder)}, "chat", *BRIEF) as user:
        user.until("> ")
        ask(user, "the man")
        user.process.send_signal(number)
        assert user.leaves() == 128 + number
    assert not list(folder.iterdir())


def test_a_second_chat_on_a_store_goes_through_the_first(environment: dict[str, str]) -> None:
    with terminal(environment, "chat", *BRIEF, "--session", "mine") as user:
        user.until("mine> ")
        ask(user, "the man")
        done = piped(environment, "hi\n", "chat", *BRIEF, "--session", "other")
        assert (done.returncode, bool(done.stdout)) == (0, True), done.stderr
        assert f"Through `perdure chat` (process {user.process.pid}, since" in done.stderr
        assert "Traceback" not in done.stderr
        # In the same conversation too: each sees what the other has said.
        done = piped(environment, "the house\n", "chat", *BRIEF, "--session", "mine")
        assert done.returncode == 0, done.stderr
        assert shown(environment, "mine")["turns"] == 2
        user.type("/history\r")
        user.until("2  user: the house")
        done = piped(environment, "", "sessions", "rm", "other", "--yes")
        assert done.returncode == 0, done.stderr
        user.type("\x04")
        assert user.leaves() == 0


def test_a_session_is_woken_in_a_new_process_with_one_line_that_says_so(environment: dict[str, str]) -> None:
    with terminal(environment, "chat", *BRIEF, "--session", "lasting") as user:
        user.until("lasting> ")
        ask(user, "the man")
        user.process.kill()
    with terminal(environment, "chat", *BRIEF, "--session", "lasting") as user:
        told = user.until("lasting> ")
        assert re.search(r"lasting: 1 turn, \d+ tokens; woken in [\d.]+ m?s: .*\.\n", told)
        ask(user, "the other")
        user.type("\x04")
        assert user.leaves() == 0
    assert shown(environment, "lasting")["turns"] == 2


def test_an_edit_keeps_the_line_that_there_was_as_a_branch(environment: dict[str, str]) -> None:
    with terminal(environment, "chat", *BRIEF, "--ctx", "256", "--session", "a") as user:
        user.until("a> ")
        ask(user, "the man", "a> ")
        ask(user, "the other", "a> ")
        ask(user, "/edit 1 a woman", "a> ")
        # One that fails leaves nothing behind.
        user.type("/edit " + "and on " * 300 + "\n")
        user.until("It was not sent.*a> ")
        user.type("\x04")
        assert user.leaves() == 0
    said = [
        [turn["messages"][0]["content"] for turn in shown(environment, name)["history"]]
        for name in ("a", "a~2")
    ]
    assert said == [["a woman"], ["the man", "the other"]]
    assert "a~3" not in piped(environment, "", "sessions", "ls").stdout


def test_the_branches_of_a_chat_that_is_not_kept_go_where_it_goes(environment: dict[str, str]) -> None:
    with terminal(environment, "chat", *BRIEF) as user:
        user.until("\n> ")
        ask(user, "the man", "\n> ")
        ask(user, "/edit a woman", "\n> ")
        user.type("\x04")
        user.until(DROP)
        user.type("plans\n")
        assert user.leaves() == 0
    assert shown(environment, "plans")["history"][0]["messages"][0]["content"] == "a woman"
    assert shown(environment, "plans~2")["history"][0]["messages"][0]["content"] == "the man"


@pytest.mark.parametrize("answer", ["c", "a"])
def test_c12_what_was_being_answered_at_a_kill_is_offered_again(
    environment: dict[str, str], answer: str
) -> None:
    """C12: shown with the part that was written, continued behind it or answered anew."""
    with terminal(
        environment, "chat", *GREEDY, "--ctx", "3000", "--max-tokens", "2500", "--session", "a"
    ) as user:
        user.until("a> ")
        user.type("tell me all\n")
        user.until("tell me all\n.+")
        if answer == "c":
            user.wait_for(lambda: bool(shown(environment, "a")["pending"]["tokens"]))
        user.process.kill()
        user.leaves()
    part = shown(environment, "a")["pending"]["reply"]["content"]
    with terminal(environment, "chat", *BRIEF, "--ctx", "3000", "--session", "a") as user:
        assert "The reply to this was interrupted:\ntell me all\n" in user.until(OFFER)
        user.type(f"{answer}\n")
        user.until("a> ")
        user.type("\x04")
        assert user.leaves() == 0
    kept = shown(environment, "a")
    [turn] = kept["history"]
    assert kept["pending"] is None
    assert turn["messages"][0]["content"] == "tell me all"
    assert turn["finish_reason"] == "length"
    written = turn["usage"]["completion_tokens"]
    if answer == "c":
        # The part may end within a character.
        assert turn["reply"]["content"].startswith(part.rstrip("\ufffd"))
        assert written == 2500
    else:
        assert written < 2500
    with terminal(environment, "chat", *BRIEF, "--session", "a") as user:
        assert "interrupted" not in user.until("a> ")


def test_a_full_context_offers_what_can_be_done_and_then_sends_the_message(
    environment: dict[str, str],
) -> None:
    with terminal(environment, "chat", *BRIEF, "--ctx", "128", "--session", "a") as user:
        user.until("a> ")
        ask(user, "one two three " * 11, "a> ")
        told = ask(user, "four five six " * 11, "a> ")
        assert "/set overflow drop_oldest" in told
        assert "overflow is one of error, drop_oldest" in ask(user, "/set overflow all", "a> ")
        told = ask(user, "/set overflow drop_oldest", "a> ")
        assert "Sending the message again that did not fit." in told
        assert "had to be left out of the prompt" in told
    assert shown(environment, "a")["turns"] == 2
