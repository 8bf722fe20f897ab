"""`perdure cache`, as a user runs it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cli.pty_user import piped
from homes import new_home

COMMAND = [sys.executable, "-m", "perdure.cli", "cache"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]
TEXT = "the man who was reading a book by the sea, until the sea had other plans for him and his book" * 2


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
def run(environment: dict[str, str], tmp_path: Path) -> Run:
    def start(*arguments: str, pipe: bytes | None = None) -> subprocess.CompletedProcess[str]:
        return piped(environment, pipe, "cache", *arguments, "--store", str(tmp_path / "store"))

    return start


@pytest.fixture(scope="session")
def warmed(zoo_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two labelled texts that share a beginning, made by the command once."""
    folder = tmp_path_factory.mktemp("warmed") / "store"
    environment = {**os.environ, "PERDURE_MODEL": str(zoo_path("llama")), "OMP_NUM_THREADS": "1"}
    for text, labels in ((TEXT, ["sea", "[bold]x"]), (TEXT[:160] + " came the rain", ["rain"])):
        options = [part for label in labels for part in ("--label", label)]
        subprocess.run(
            [*COMMAND, "warm", text, *options, "--ctx", "256", "--store", str(folder)],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
        )
    return folder


@pytest.fixture
def store(warmed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(warmed, tmp_path / "store")


def facts(done: subprocess.CompletedProcess[str], code: int = 0) -> dict[str, Any]:
    assert done.returncode == code, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def refused(done: subprocess.CompletedProcess[str], said: str) -> None:
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("perdure: ")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def block_files(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "blocks").rglob("*") if path.is_file())


def test_warming_twice_computes_once_also_in_another_process(run: Run) -> None:
    first = facts(run("warm", TEXT, "-l", "a", "--ctx", "256", "--json"))
    assert first["kept"] == first["tokens"] > 64
    assert first["computed"] >= first["tokens"]
    assert first["labels"] == ["a"]
    second = facts(run("warm", "-", "-l", "b", "--ctx", "256", "--json", pipe=TEXT.encode()))
    assert second == {**first, "computed": 0, "labels": ["a", "b"]}
    third = run("warm", "--ctx", "256", pipe=TEXT.encode())
    assert third.returncode == 0
    assert "nothing had to be computed" in third.stdout
    assert f"{first['kept']} of {first['tokens']} tokens are kept" in third.stdout


def test_without_a_folder_it_is_the_one_at_home(
    run: Run, environment: dict[str, str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [*COMMAND, "warm", "a text", "--ctx", "64"],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(tmp_path / "home" / "store") in done.stdout
    assert block_files(tmp_path / "home" / "store")


def test_stats_tell_what_is_kept_and_under_which_labels(run: Run, store: Path) -> None:
    found = facts(run("stats", "--json"))
    assert found["store"] == str(store)
    assert found["blocks"] == len(block_files(store))
    assert found["bytes"] == sum(path.stat().st_size for path in block_files(store))
    assert [record["labels"] for record in found["records"]] == [["[bold]x", "sea"], ["rain"]]
    assert all(record["kept"] == record["tokens"] for record in found["records"])
    shown = run("stats")
    assert shown.returncode == 0
    assert re.search(rf"bytes +{found['bytes']}\n", shown.stdout)
    assert re.search(r"records +2\n", shown.stdout)
    assert "[bold]x, sea" in shown.stdout


def test_blocks_and_records_are_listed_page_by_page(run: Run, store: Path) -> None:
    """All pages together are all there is, each once."""

    def page(*arguments: str) -> list[dict[str, Any]]:
        done = run("blocks", "--json", *arguments)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert isinstance(found, list)
        return found

    every = page()
    assert {block["id"] for block in every} == {path.name for path in block_files(store)}
    first = page("--limit", "1")
    assert first + page("--after", first[0]["id"]) == every
    assert page("--after", every[-1]["id"]) == []
    shown = run("blocks", "--limit", "1").stdout
    assert shown.startswith(f"{every[0]['id']}  tokens {every[0]['start']} to ")
    assert shown.endswith(f" {every[0]['nbytes']} bytes\n")
    refused(run("blocks", "--after", "x"), "no id of a block")
    one = facts(run("stats", "--json", "--limit", "1"))["records"]
    two = facts(run("stats", "--json", "--after", str(one[0]["number"])))["records"]
    assert [record["labels"] for record in one + two] == [["[bold]x", "sea"], ["rain"]]
    assert run("stats", "--limit", "0").returncode == 2


def test_p4_clearing_a_label_leaves_the_others(run: Run, store: Path) -> None:
    before = facts(run("stats", "--json"))
    cleared = facts(run("clear", "--label", "sea", "--json"))
    after = facts(run("stats", "--json"))
    assert cleared == {"records": 1, "bytes": before["bytes"] - after["bytes"]}
    assert cleared["bytes"] > 0
    assert [record["labels"] for record in after["records"]] == [["rain"]]
    assert after["records"][0]["kept"] == after["records"][0]["tokens"]
    assert run("verify").returncode == 0
    again = run("clear", "-l", "sea", "-l", "unknown")
    assert (again.returncode, again.stdout) == (0, "dropped 0 records and 0 bytes\n")


def test_clearing_everything_asks_first(run: Run, store: Path) -> None:
    assert run("clear", "--all", pipe=b"n\n").returncode == 1
    assert block_files(store)
    assert facts(run("clear", "--all", "--json", pipe=b"y\n"))["records"] == 2
    assert block_files(store) == []
    assert facts(run("stats", "--json"))["records"] == []
    assert run("clear", "--all", "--yes").stdout == "dropped 0 records and 0 bytes\n"


@pytest.mark.parametrize("arguments", [["clear"], ["clear", "--all", "--label", "a"], ["warm", "a", "b"]])
def test_wrong_usage_exits_with_2(arguments: list[str], environment: dict[str, str]) -> None:
    assert piped(environment, None, "cache", *arguments).returncode == 2


def test_verify_is_content_with_a_sound_store(run: Run, store: Path) -> None:
    found = facts(run("verify", "--json"))
    assert found["blocks"] == len(block_files(store))
    wrong = ("missing", "adopted", "mended", "quarantined", "leftovers", "rebuilt")
    assert not any(found[name] for name in wrong)
    shown = run("verify")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith(f"{found['blocks']} blocks, {found['nbytes']} bytes: 0 missing")


def test_verify_puts_right_what_it_can_and_exits_with_1(run: Run, store: Path) -> None:
    first, second, *_ = block_files(store)
    first.write_bytes(first.read_bytes()[:-1])
    second.unlink()
    found = facts(run("verify", "--json"), code=1)
    assert (found["missing"], found["quarantined"]) == (2, 1)
    assert (store / "quarantine" / first.name).exists()
    assert run("verify").returncode == 0
    # What is gone is computed again, and kept.
    again = facts(run("warm", TEXT, "--ctx", "256", "--json"))
    assert again["kept"] == again["tokens"]
    assert again["labels"] == ["[bold]x", "sea"]


@pytest.mark.parametrize("loss", ["deleted", "garbage"])
def test_an_index_that_is_lost_is_made_anew(run: Run, store: Path, loss: str) -> None:
    before = facts(run("stats", "--json"))
    index = store / "index.sqlite"
    index.unlink()
    if loss == "garbage":
        index.write_bytes(b"garbage" * 5000)
        for command in (["stats"], ["warm", TEXT, "--ctx", "256"]):
            refused(run(*command), f"`perdure cache verify --store {store}` rebuilds it")
    done = run("verify")
    assert done.returncode == 1
    assert "the index was damaged and has been rebuilt" in done.stdout
    after = facts(run("stats", "--json"))
    assert {**after, "records": []} == {**before, "records": []}
    assert facts(run("warm", TEXT, "--ctx", "256", "--json"))["computed"] == 0
    assert run("verify").returncode == 0


def test_a_store_of_a_newer_perdure_is_left_alone(run: Run, store: Path) -> None:
    with closing(sqlite3.connect(store / "index.sqlite")) as db:
        db.execute("PRAGMA user_version = 99")
    for command in (["stats"], ["verify"]):
        refused(run(*command), "update perdure")


@pytest.mark.parametrize("command", [["stats"], ["verify"], ["clear", "--all", "-y"]])
def test_no_store_is_said_so_and_none_is_made(run: Run, tmp_path: Path, command: list[str]) -> None:
    refused(run(*command), f"`perdure cache warm --store {tmp_path / 'store'}` makes one")
    assert not (tmp_path / "store").exists()


HOLD = """
import sys
from pathlib import Path
from perdure.cache.tiers.disk import DiskTier
disk = DiskTier(Path(sys.argv[1]), budget=1 << 30)
print("ready", flush=True)
sys.stdin.read()
"""


def test_while_another_process_writes_there_is_reading_only(run: Run, store: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(store)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        assert len(facts(run("stats", "--json"))["records"]) == 2
        for command in (["clear", "-l", "sea"], ["warm", TEXT, "--ctx", "256"]):
            refused(run(*command), "close that one, choose another store, or open this one for reading")
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert run("verify").returncode == 0
    assert facts(run("clear", "-l", "sea", "--json"))["records"] == 1


@pytest.mark.parametrize(
    ("arguments", "pipe", "said"),
    [
        (["warm", TEXT, "--ctx", "20"], None, "20 fit in all"),
        (["warm", TEXT, "--model", "/nowhere.gguf"], None, "there is no file /nowhere.gguf"),
        (["warm", "--ctx", "64"], b"ab\xff", "standard input is not UTF-8 text (byte 2)"),
    ],
    ids=["too long", "no model", "no text"],
)
def test_what_cannot_be_done_exits_with_1_and_plain_words(
    run: Run, arguments: list[str], pipe: bytes | None, said: str
) -> None:
    refused(run(*arguments, pipe=pipe), said)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ([], {"stats", "warm", "clear", "verify"}),
        (["warm"], {"--label", "--model", "--ctx", "--store", "--json"}),
        (["clear"], {"--label", "--all", "--yes", "--store", "--json"}),
    ],
    ids=["all", "warm", "clear"],
)
def test_help_names_every_command_and_option(
    environment: dict[str, str], command: list[str], expected: set[str]
) -> None:
    done = subprocess.run(
        [*COMMAND, *command, "--help"], env=environment, capture_output=True, text=True, check=True
    )
    assert expected <= set(re.findall(r"(?:--)?[a-z]+", done.stdout))
