"""What encodes images is fetched where it is not installed: after a question, and no byte of another file."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.pty_user import COMMAND, terminal, terminal_environment
from perdure import LibraryFetchError
from perdure.ext.fetching.package_index import fetched_wheel
from perdure.ext.fetching.wheel import unpack_wheels
from perdure.ext.images import fetched

from .pictures import picture

Toy = Callable[[str], tuple[Path, Path]]

HIDDEN = '''
import sys
from importlib.machinery import PathFinder


class Hidden(PathFinder):
    """What is installed is not found; what perdure has fetched is."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in ("PIL", "xllamacpp"):
            path = [each for each in sys.path if "runtime" in each]
        return super().find_spec(name, path, target)


sys.meta_path[:] = [Hidden if each is PathFinder else each for each in sys.meta_path]
'''


@pytest.fixture
def environment(toy: Toy, tmp_path: Path) -> dict[str, str]:
    """Of a machine without Pillow and xllamacpp."""
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text(HIDDEN)
    known = terminal_environment(toy("llava")[0], tmp_path / "home", term="dumb")
    return {**known, "PYTHONPATH": f"{tmp_path / 'hidden'}:{known.get('PYTHONPATH', '')}"}


def test_the_wheels_of_this_machine_are_known() -> None:
    assert {each.project for each in fetched.wheels()} == {"xllamacpp", "pillow"}
    assert len(fetched.wheels()) == 2
    known = json.loads((Path(fetched.__file__).with_name("wheels.json")).read_text())
    assert all(len(sha256) == 64 and nbytes > 1 << 20 for sha256, nbytes in known.values())


def test_a_wheel_with_other_bytes_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = fetched.wheels()[0]
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / wheel.file).write_bytes(b"PK another one")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    target = tmp_path / "runtime" / "images"
    with pytest.raises(LibraryFetchError, match="is not the wheel that was asked for"):
        unpack_wheels(target, [(wheel.file, wheel.sha256)], "it", room=1 << 20)
    assert not target.exists()


@pytest.mark.full
def test_a_person_is_asked_once_and_the_image_is_read(environment: dict[str, str], tmp_path: Path) -> None:
    """Who says no, or nobody who could be asked, gets the reason; what was fetched serves later commands."""
    wheel = next(each for each in fetched.wheels() if each.project == "xllamacpp")
    try:
        with fetched_wheel(wheel.file, tmp_path / "parts", room=1 << 28, sha256=wheel.sha256) as file:
            (tmp_path / "wheels").mkdir()
            shutil.copy(file, tmp_path / "wheels" / wheel.file)
    except Exception as error:
        pytest.skip(f"{wheel.file} cannot be fetched here: {error}")
    environment["PIP_FIND_LINKS"] = f"{tmp_path / 'wheels'} {environment.get('PIP_FIND_LINKS', '')}"
    photo = tmp_path / "photo.png"
    photo.write_bytes(picture())
    asked = (
        "run", "--image", str(photo), "--store", str(tmp_path / "store"), "-t", "0", "--max-tokens", "4",
        "--ctx", "1024", "which one?",
    )  # fmt: skip

    def piped() -> subprocess.CompletedProcess[str]:
        # Not out of the forked one, which has what is hidden here.
        command = [*COMMAND, *asked]
        return subprocess.run(command, env=environment, input="", capture_output=True, text=True, check=False)

    refused = piped()
    assert refused.returncode == 1
    assert 'pip install "perdure[images]"' in " ".join(refused.stderr.split())
    home = tmp_path / "home" / "runtime"
    for answer in ("n", "y"):
        with terminal(environment, *asked) as user:
            assert "xllamacpp" in user.until(r"MB\?")
            assert not list(home.glob("images-*"))
            user.type(f"{answer}\n")
            assert user.leaves() == (0 if answer == "y" else 1)
    assert list(home.glob("images-*/PIL"))
    again = piped()
    assert again.returncode == 0, again.stderr
    assert again.stdout.strip()
