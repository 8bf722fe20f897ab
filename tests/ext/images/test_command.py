"""Images in the command: `run --image`, `/image` and pasted paths in a chat, `show`, `fit`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.pty_user import piped, terminal, terminal_environment
from perdure.sessions.sessions import Sessions

from .pictures import picture

Toy = Callable[[str], tuple[Path, Path]]

BRIEF = ("-t", "0", "--max-tokens", "4", "--ctx", "1024")


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "a photo.png"
    path.write_bytes(picture())
    return path


@pytest.fixture
def environment(toy: Toy, tmp_path: Path) -> dict[str, str]:
    return terminal_environment(toy("llava")[0], tmp_path / "home", term="dumb")


def images_in(store: Path, name: str) -> int:
    with Sessions(store, readonly=True) as sessions:
        return sum(len(said.images) for turn in sessions.get(name).history() for said in turn.messages)


def test_run_shows_images_and_the_next_run_continues(
    environment: dict[str, str], photo: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    kept = ("--store", str(store), "--session", "walk", "--json", *BRIEF)
    first = piped(environment, "", "run", "--image", str(photo), "--image", str(photo), *kept, "which one?")
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["usage"]["prompt_tokens"] > 128
    second = piped(environment, "", "run", *kept, "and then?")
    assert second.returncode == 0, second.stderr
    assert images_in(store, "walk") == 2
    # Without a name it is the last run, and takes the place of the one before.
    alone = ("--store", str(store), "--json", *BRIEF)
    for _ in range(2):
        asked = piped(environment, "", "run", "--image", str(photo), *alone, "which one?")
        assert asked.returncode == 0, asked.stderr
    assert images_in(store, "last-run") == 1
    refused = piped(environment, "", "run", "--raw", "--image", str(photo), "hm")
    assert refused.returncode == 2
    assert "--image asks in a conversation" in " ".join(refused.stderr.split())
    missing = piped(environment, "", "run", "--image", str(tmp_path / "none.png"), *alone, "which one?")
    assert missing.returncode == 1
    assert "cannot be read" in missing.stderr


def test_a_chat_takes_images_by_a_command_and_by_a_pasted_path(
    environment: dict[str, str], photo: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    with terminal(environment, "chat", "--store", str(store), "--session", "walk", *BRIEF) as user:
        user.until("walk> ")
        user.type(f"/image {photo}\n")
        user.until("goes with the next message")
        user.type(f"'{photo}'\n")
        user.until("goes with the next message")
        user.type("which one?\n")
        user.until("walk> ")
        user.type("/image none.png\n")
        user.until("cannot be read")
        user.type("/quit\n")
        user.leaves()
    assert images_in(store, "walk") == 2


def test_show_and_fit_name_the_projector(environment: dict[str, str], toy: Toy, tmp_path: Path) -> None:
    model, projector = toy("llava")
    shown = piped(environment, "", "show", str(model))
    assert projector.name in shown.stdout
    assert "images" in shown.stdout
    assert (
        projector.name in json.loads(piped(environment, "", "show", "--json", str(model)).stdout)["projector"]
    )
    blind = tmp_path / "blind.gguf"
    shutil.copy(model, blind)
    assert json.loads(piped(environment, "", "show", "--json", str(blind)).stdout)["projector"] is None
    assert "projector" in " ".join(piped(environment, "", "fit", str(model)).stdout.split())
    assert "projector" not in piped(environment, "", "fit", str(blind)).stdout


def test_a_projector_of_another_model_is_refused_in_words(
    environment: dict[str, str], toy: Toy, photo: Path, tmp_path: Path
) -> None:
    model, _ = toy("llava")
    folder = tmp_path / "mixed"
    folder.mkdir()
    shutil.copy(model, folder / "a.gguf")
    shutil.copy(toy("qwen3vl")[1], folder / "mmproj-a.gguf")
    asked = piped(
        environment, "", "run", "-m", str(folder / "a.gguf"), "--image", str(photo), *BRIEF,
        "--store", str(tmp_path / "s"), "which one?",
    )  # fmt: skip
    assert asked.returncode == 1
    assert "is no projector for this model" in " ".join(asked.stderr.split())
