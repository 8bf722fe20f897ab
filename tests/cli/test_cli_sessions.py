"""`perdure sessions`, as a user runs it."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cli.pty_user import piped, terminal
from homes import new_home
from perdure.sessions.sessions import Sessions
from perdure.sessions.turn import Turn

NAME = "é 한국 🙂"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def environment(zoo_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    return {
        **kept,
        "PERDURE_MODEL": str(zoo_path("llama")),
        "PERDURE_HOME": str(new_home(tmp_path_factory.mktemp("home"))),
        "TERM": "dumb",
        "LC_ALL": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="module")
def made(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a session of three turns, made by the command once."""
    folder = tmp_path_factory.mktemp("made") / "store"
    messages = "the man\nthe other\nand then what\n"
    asked = ("-t", "0", "--max-tokens", "12", "--system", "Be terse.")
    done = piped(environment, messages, "chat", *asked, "--session", NAME, "--store", str(folder))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "store")


@pytest.fixture
def run(environment: dict[str, str], store: Path) -> Run:
    """The command on the store. It finds no model unless it is given one."""
    without = {**environment, "PERDURE_MODEL": str(store / "no such model.gguf")}

    def start(*arguments: str, model: bool = False) -> subprocess.CompletedProcess[str]:
        found = environment if model else without
        return piped(found, "", "sessions", *arguments, "--store", str(store))

    return start


def facts(done: subprocess.CompletedProcess[str], code: int = 0) -> Any:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)


def told(done: subprocess.CompletedProcess[str], code: int = 0) -> str:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if code == 0 else done.stderr


def test_ls_lists_the_latest_first(run: Run) -> None:
    run("fork", NAME, "later")
    found = facts(run("ls", "--json"))
    assert [(row["name"], row["turns"]) for row in found] == [("later", 3), (NAME, 3)]
    assert found[0]["origin"] == {"how": "fork", "session": NAME, "turn": 3}
    lines = told(run("ls")).splitlines()
    assert lines[0].endswith(f"  later  (fork of {NAME} after turn 3)")
    assert lines[1].endswith(f"  {NAME}")
    assert facts(run("ls", "--namespace", "another", "--json")) == []
    assert len(facts(run("ls", "--all", "--json"))) == 2


def test_ls_finds_sessions_by_what_was_said(run: Run) -> None:
    assert [row["name"] for row in facts(run("ls", "--text", "the other", "--json"))] == [NAME]
    assert facts(run("ls", "--text", "nobody said this", "--json")) == []
    assert "No session has" in run("ls", "--text", "nobody said this").stderr
    assert [row["name"] for row in facts(run("search", "the other", "--json"))] == [NAME]


def test_a_title_is_shown_found_and_taken_back(run: Run) -> None:
    assert f"{NAME} is called Lisbon in spring in lists" in told(run("rename", NAME, " Lisbon  in spring "))
    assert told(run("search", "LISBON")).endswith(f"  {NAME}  Lisbon in spring\n")
    assert "title     Lisbon in spring\n" in told(run("show", NAME))
    assert "at most 200 characters, this one has 201" in told(run("rename", NAME, "x" * 201), 1)
    run("rename", NAME, "")
    assert told(run("ls")).endswith(f"  {NAME}\n")


def test_show_tells_what_was_said(run: Run) -> None:
    found = facts(run("show", NAME, "--json"))
    assert (found["name"], found["turns"], found["system"]) == (NAME, 3, "Be terse.")
    assert [turn["messages"][0]["content"] for turn in found["history"]] == [
        "the man",
        "the other",
        "and then what",
    ]
    assert all(turn["reply"]["content"] and turn["usage"]["completion_tokens"] for turn in found["history"])
    text = told(run("show", NAME))
    assert "user: the other\n" in text
    assert "system    Be terse.\n" in text
    assert "there is no session 'nobody'" in told(run("show", "nobody"), 1)


def test_fork_and_rewind_move_about_without_a_model(run: Run) -> None:
    """S6 in the command: a fork is its own."""
    assert facts(run("fork", NAME, "b", "--turn", "2", "--json"))["turns"] == 2
    assert "b has 1 turn now" in told(run("rewind", "b"))
    assert facts(run("rewind", NAME, "--to", "0", "--json"))["turns"] == 0
    assert facts(run("show", "b", "--json"))["history"][0]["messages"][0]["content"] == "the man"
    assert "has 1 turn, so it cannot go back by 5" in told(run("rewind", "b", "5"), 1)
    assert "there is a session 'b' already" in told(run("fork", NAME, "b"), 1)


def test_labels_are_searched_woken_and_forgotten(run: Run) -> None:
    memory = facts(run("label", NAME, "the sea", "--turn", "1", "--note", "Look here", "--json"))
    assert memory["address"].startswith("perdure://")
    assert (memory["session"], memory["turn"], memory["label"]) == (NAME, 1, "the sea")
    assert facts(run("memories", "wake", "--as", "only", "--json"))["turns"] == 1
    second = told(run("label", NAME, "end", "--kind", "place")).strip()
    assert [each["label"] for each in facts(run("memories", "search", "--json"))] == ["the sea", "end"]
    assert [each["label"] for each in facts(run("memories", "search", "look", "--json"))] == ["the sea"]
    assert [each["label"] for each in facts(run("memories", "search", "--kind", "place", "--json"))] == [
        "end"
    ]
    assert "Look here" in told(run("memories", "search", "--label", "the sea"))
    woken = facts(run("memories", "wake", memory["address"], "--as", "at sea", "--json"))
    assert (woken["turns"], woken["origin"]["label"]) == (1, "the sea")
    done = run("memories", "wake", "--as", "which")
    assert "there are 2 memories" in told(done, 1)
    assert memory["address"] in done.stderr
    told(run("memories", "forget", second))
    assert facts(run("memories", "forget", memory["address"], "--json")) == {"forgotten": memory["address"]}
    assert "there is no memory at" in told(run("memories", "wake", second, "--as", "gone"), 1)
    assert "is no address" in told(run("memories", "wake", "nonsense", "--as", "gone"), 1)


def test_rm_forgets_all_or_none_and_asks(run: Run) -> None:
    run("fork", NAME, "b")
    assert "there is no session 'c'" in told(run("rm", "b", "c", "--yes"), 1)
    assert run("rm", "b").returncode == 1
    assert len(facts(run("ls", "--json"))) == 2
    assert facts(run("rm", NAME, "--yes", "--json")) == {"removed": [NAME]}
    assert [row["name"] for row in facts(run("ls", "--json"))] == ["b"]
    assert facts(run("show", "b", "--json"))["turns"] == 3


@pytest.mark.extension("upkeep")
def test_text_and_an_export_without_state_come_out_without_a_model(
    run: Run, store: Path, tmp_path: Path
) -> None:
    told(run("export", NAME, str(tmp_path / "talk.md")))
    assert "the other" in (tmp_path / "talk.md").read_text()
    told(run("export", NAME, str(tmp_path / "talk.jsonl")))
    lines = [json.loads(line) for line in (tmp_path / "talk.jsonl").read_text().splitlines()]
    assert [line["role"] for line in lines] == ["system", *["user", "assistant"] * 3]
    file = tmp_path / "talk.session"
    assert facts(run("export", NAME, str(file), "--no-state", "--json"))["bytes"] == file.stat().st_size
    assert "exists already" in told(run("export", NAME, str(file), "--no-state"), 1)
    told(run("export", NAME, str(file), "--no-state", "--force"))
    assert facts(run("import", str(file), "--as", "back", "--json"))["turns"] == 3
    assert "there is a session" in told(run("import", str(file)), 1)
    ours, theirs = (facts(run("show", name, "--json"))["history"] for name in (NAME, "back"))
    assert ours == theirs
    assert "cannot be" in told(run("export", NAME, str(tmp_path / "no" / "folder.md")), 1)


@pytest.mark.extension("upkeep")
def test_an_export_with_state_moves_to_another_store(
    run: Run, environment: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "talk.session"
    told(run("export", NAME, str(file), model=True))
    other = ("--store", str(tmp_path / "other"))
    plain = facts(piped(environment, "", "sessions", "import", str(file), "--as", "a", *other, "--json"))
    assert (plain["taken"]["turns"], plain["taken"]["state_tokens"]) == (3, 0)
    assert "another store wrote it" in plain["left_out"]["state"]
    done = piped(environment, "", "sessions", "import", str(file), "--trust-state", *other, "--json")
    found = facts(done)
    assert (found["name"], found["turns"], found["left_out"]) == (NAME, 3, {})
    assert sum(found["tiers"].values()) > 0
    woken = facts(piped(environment, "", "sessions", "wake", NAME, *other, "--json"))
    assert woken["tiers"].get("disk", 0) > 0
    without = piped(environment, "", "sessions", "import", str(file), "--as", "b", "--no-state", *other)
    assert "left out: its tokens; no model was loaded" in told(without)
    assert facts(piped(environment, "", "sessions", "verify", *other, "--json"))["sound"]


@pytest.mark.parametrize("damage", [b"", b"not an archive", b"\0" * 10240])
def test_a_file_that_is_no_export_is_refused(run: Run, tmp_path: Path, damage: bytes) -> None:
    file = tmp_path / "talk.session"
    file.write_bytes(damage)
    assert "export of a session, or " in told(run("import", str(file)), 1)
    assert "cannot be used" in told(run("import", str(tmp_path / "missing")), 1)


def test_sleep_and_wake_tell_what_they_took(run: Run, store: Path) -> None:
    """S8: what was planned is what it took. S4: what is gone is computed."""
    planned = facts(run("wake", NAME, "--plan", "--json", model=True))
    woken = facts(run("wake", NAME, "--json", model=True))
    assert planned["tiers"] == woken["tiers"]
    assert planned["compute"] == woken["compute"]
    assert woken["tiers"]["disk"] > 0
    shutil.rmtree(store / "blocks")
    for leftover in store.glob("index.sqlite*"):
        leftover.unlink()
    assert facts(run("wake", NAME, "--json", model=True))["tiers"] == {}
    assert facts(run("sleep", NAME, "--json", model=True))["tiers"]["disk"] > 0
    assert " from disk" in told(run("wake", NAME, model=True))
    assert " from disk" in told(run("sleep", NAME, model=True))


@pytest.mark.extension("upkeep")
def test_sizes_tell_how_much_each_namespace_has_and_no_word_of_it(
    run: Run, store: Path, tmp_path: Path
) -> None:
    with Sessions(store) as sessions:
        mine = sessions.get(NAME)
        mine.fork("a fork that shares its turns")
        mine.export(tmp_path / "moved.perdure", state=False)
        for name in ("secret plan", "another"):
            sessions.import_(tmp_path / "moved.perdure", name, namespace="team")
    found = {each["namespace"]: each for each in facts(run("sizes", "--json"))}
    assert {name: (each["sessions"], each["turns"]) for name, each in found.items()} == {
        "": (2, 3),
        "team": (2, 6),
    }
    assert 0 < found[""]["nbytes"] < found["team"]["nbytes"]
    shown = told(run("sizes"))
    assert re.search(r"^\(no key\) +2 sessions, 3 turns +[\d.]+ k?B$", shown, re.MULTILINE)
    assert re.search(r"^team +2 sessions, 6 turns +[\d.]+ k?B$", shown, re.MULTILINE)
    for word in ("the man", "terse", "secret", NAME):
        assert word not in shown
        assert word not in json.dumps(list(found.values()), ensure_ascii=False)


@pytest.mark.extension("upkeep")
def test_verify_finds_all_well(run: Run) -> None:
    run("label", NAME, "here")
    found = facts(run("verify", "--json"))
    assert found["sound"]
    assert (found["sessions"], found["turns"], found["memories"], found["damaged"]) == (1, 3, 1, [])
    assert found["blocks"]["blocks"] > 0
    assert told(run("verify")).endswith("all is well\n")


@pytest.mark.extension("upkeep")
def test_verify_names_the_session_whose_turn_was_changed(run: Run, store: Path) -> None:
    """S2: one changed letter is found, and the other session is not blamed for it."""
    run("fork", NAME, "whole", "--turn", "1")
    run("label", NAME, "here")
    with closing(sqlite3.connect(store / "sessions.sqlite")) as database, database:
        database.execute("UPDATE turn SET reply = replace(reply, 'content', 'conten_') WHERE depth = 2")
    shown = run("show", NAME)
    assert "turn 2 of session" in told(shown, 1)
    assert "Traceback" not in shown.stderr
    found = facts(run("verify", "--json"), 1)
    assert not found["sound"]
    assert [entry["what"] for entry in found["damaged"]] == [f"session {NAME}", f"memory here of {NAME}"]
    assert found["repair"]["aside"] == str(store / "sessions.damaged-1.sqlite")
    # What could be proved is what there is now.
    assert facts(run("verify", "--json"))["sound"]
    assert len(facts(run("show", NAME, "--json"))["history"]) == 1


@pytest.mark.extension("upkeep")
def test_verify_finds_damage_in_blocks_and_in_the_database(run: Run, store: Path) -> None:
    block = max(path for path in (store / "blocks").rglob("*") if path.is_file())
    block.write_bytes(block.read_bytes()[:-1])
    found = facts(run("verify", "--json"), 1)
    assert (found["sound"], found["blocks"]["quarantined"], found["damaged"]) == (False, 1, [])
    assert facts(run("verify", "--json"))["sound"]
    for log in store.glob("sessions.sqlite-*"):
        log.unlink()
    data = bytearray((store / "sessions.sqlite").read_bytes())
    data[200:] = b"\xa5" * (len(data) - 200)
    (store / "sessions.sqlite").write_bytes(data)
    found = facts(run("verify", "--json"), 1)
    assert "damaged" in found["database"]
    assert "damaged" in told(run("ls"), 1)


@pytest.mark.extension("upkeep")
def test_a_store_that_is_not_there_is_told(environment: dict[str, str], tmp_path: Path) -> None:
    nowhere = ("--store", str(tmp_path / "nowhere"))
    for command in (["ls"], ["show", "x"], ["fork", "x", "y"], ["rm", "x", "-y"], ["verify"], ["wake", "x"]):
        done = piped(environment, "", "sessions", *command, *nowhere)
        assert "there are no sessions in" in told(done, 1)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.extension("upkeep")
def test_a_store_in_use_is_read_and_changed(environment: dict[str, str], run: Run, store: Path) -> None:
    asked = ("chat", "-t", "0", "--max-tokens", "4", "--session", "mine", "--store", str(store))
    with terminal(environment, *asked) as user:
        user.until("mine> ")
        assert {row["name"] for row in facts(run("ls", "--json"))} == {NAME, "mine"}
        for command in (["fork", NAME, "b"], ["rewind", NAME], ["label", "b", "l"], ["sleep", NAME]):
            assert run(*command, model=True).returncode == 0
        assert {row["name"] for row in facts(run("ls", "--json"))} == {NAME, "mine", "b"}
        found = facts(run("verify", "--json"), 3)
        assert found["damaged"] == []
        assert "in use by `perdure chat` (process" in found["unread"]
        user.type("\x04")
        assert user.leaves() == 0


def test_sessions_of_other_namespaces_are_counted_and_an_origin_is_never_none(run: Run, store: Path) -> None:
    with Sessions(store) as sessions:
        sessions.create("theirs", namespace="bob")
        sessions.create("by a program", agent="claude-cli")
        # Y24: as the Responses API makes one.
        start = Turn(kind="start", messages=())
        sessions.store.create("", "talked", [start], origin={"how": "conversation", "metadata": {}})
    done = run("ls")
    assert re.search(r"talked\W+conversation\)", done.stdout)
    assert "1 session of other namespaces; --all lists them too." in done.stderr
    assert re.search(r"by a program\W+made by claude-cli", done.stdout)
    assert "None" not in done.stdout
    assert "namespaces" not in run("ls", "--all").stderr


@pytest.mark.parametrize("name", [".", ".."])
def test_y24_no_new_session_has_a_name_that_no_address_reaches(run: Run, name: str) -> None:
    """Y24: in an address these stand for folders."""
    assert "not . or .." in told(run("fork", NAME, name), 1)
    assert facts(run("fork", NAME, "...", "--json"))["name"] == "..."


@pytest.mark.extension("upkeep")
def test_the_cache_command_works_beside_sessions(environment: dict[str, str], run: Run, store: Path) -> None:
    before = facts(run("show", NAME, "--json"))
    stats = json.loads(piped(environment, "", "cache", "stats", "--store", str(store), "--json").stdout)
    assert stats["blocks"] > 0
    assert piped(environment, "", "cache", "verify", "--store", str(store)).returncode == 0
    done = piped(environment, "", "cache", "clear", "--all", "--yes", "--store", str(store))
    assert done.returncode == 0, done.stderr
    assert facts(run("show", NAME, "--json")) == before
    assert facts(run("verify", "--json"))["sound"]
    asked = ("chat", "-t", "0", "--max-tokens", "4", "--session", NAME, "--store", str(store))
    done = piped(environment, "and now\n", *asked)
    assert done.returncode == 0
    assert " to compute" in done.stderr
