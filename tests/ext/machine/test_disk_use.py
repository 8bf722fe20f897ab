"""`perdure du`, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

from cli.test_cli_models import Run, fetched, run

__all__ = ["fetched", "run"]


def test_disk_use_is_listed_by_what_it_is_for(run: Run, fetched: Path, tmp_path: Path) -> None:
    blob = tmp_path / "hf" / "hub" / "models--me--it" / "blobs" / "x"
    blob.parent.mkdir(parents=True)
    blob.write_bytes(bytes(5000))
    (blob.parent / "link").symlink_to(blob)
    done = run("du", "--json", HF_HOME=str(tmp_path / "hf"))
    assert done.returncode == 0, done.stderr
    used = {each["what"]: each["bytes"] for each in json.loads(done.stdout)}
    assert used["hf:me/it/a.gguf"] == fetched.stat().st_size
    assert used["Hugging Face cache"] == 5000
    shown = run("du", HF_HOME=str(tmp_path / "hf"))
    assert shown.stdout.splitlines()[0].split() == ["what", "size", "where"]
