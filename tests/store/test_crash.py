"""S1: what was told to be done survives a kill at any change of the store; nothing is ever half there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from store import children
from store.crashing import FAULTS, SCENARIOS

RUN = "import runpy; runpy.run_module('store.crashing', run_name='__main__')"

# Many changes are like each other: a sample stands for them here, all of them are in the soak.
STEPS = {
    name: 29 if name.startswith(("runtime", "session turns", "session branches", "session eviction")) else 3
    for name in SCENARIOS
}

NAMES = [
    pytest.param(name, marks=pytest.mark.extension("upkeep")) if name == "session repair" else name
    for name in SCENARIOS
]


@pytest.fixture
def crash(shim: Path, tmp_path: Path) -> Callable[[str, int], dict[str, Any]]:
    def crash(name: str, step: int) -> dict[str, Any]:
        out = children.run(RUN, name, tmp_path, step, environment={"LD_PRELOAD": str(shim)})
        found = json.loads(out)
        assert isinstance(found, dict)
        print(f"{name}: {found['points']} crash points, {found['torn']} of them in the middle of a write")
        return found

    return crash


@pytest.mark.parametrize("name", NAMES)
def test_s1_a_kill_at_any_change_costs_nothing_that_was_told_to_be_done(
    name: str, crash: Callable[[str, int], dict[str, Any]]
) -> None:
    found = crash(name, STEPS[name])
    # Writes, syncs, and the removals with which SQLite ends: the shim is really in between.
    assert min(found[kind] for kind in ("write", "fsync", "unlink")) > 0
    assert found["points"] >= found["changes"] // STEPS[name]
    assert found["torn"] > 0


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_s1_a_kill_at_every_single_change(name: str, crash: Callable[[str, int], dict[str, Any]]) -> None:
    found = crash(name, 1)
    # Threads may take turns otherwise than they did when the changes were counted.
    assert found["points"] >= 0.9 * found["changes"]


LOG = "/index.sqlite-wal"


def is_log(line: str) -> bool:
    return line.endswith(LOG)


def check_order(diary: list[str]) -> None:
    """Nothing is relied on before it is down on the disk."""
    assert any(line.startswith("ack") for line in diary)
    for at, line in enumerate(diary):
        kind, path = line.split(" ", 1)
        before, after = diary[:at], diary[at + 1 :]
        if kind == "rename" and "/blocks/" in path:
            synced = max(i for i, step in enumerate(before) if step.startswith(f"fsync {path}."))
            written = max(i for i, step in enumerate(before) if step.startswith(f"write {path}."))
            assert synced > written, "a file gets its name only when its bytes are down"
            entered = next(i for i, step in enumerate(after) if is_log(step))
            assert f"fsync {Path(path).parent}" in after[:entered], "an entry comes after the name is down"
        if kind == "mkdir" and Path(path).parent.name == "blocks":
            entered = next(i for i, step in enumerate(after) if is_log(step))
            assert f"fsync {Path(path).parent}" in after[:entered], "and after the name of its folder is"
        if kind == "unlink" and "/blocks/" in path:
            last = next(step for step in reversed(before) if is_log(step))
            assert last.startswith("fsync"), "a file goes only when it is down that its entry is gone"
        if kind == "ack" and path != "closed":
            last = next(step for step in reversed(before) if is_log(step))
            assert last.startswith("fsync"), "nothing is told to be done before it is down"


@pytest.mark.parametrize("name", ["put", "evict", "drop", "record"])
def test_s1_what_a_power_cut_needs_comes_in_the_right_order(
    name: str, crash: Callable[[str, int], dict[str, Any]], tmp_path: Path
) -> None:
    """A kill keeps what the system holds in memory, a power cut does not: there the syncs decide."""
    crash(name, 0)
    check_order(json.loads((tmp_path / "diary.json").read_text()))


@pytest.mark.parametrize("fault", FAULTS)
def test_s1_a_fault_planted_in_the_store_is_found(fault: str, shim: Path, tmp_path: Path) -> None:
    environment = {"LD_PRELOAD": str(shim)}
    with children.start(RUN, FAULTS[fault][0], tmp_path, 1, fault, environment=environment) as child:
        _, err = child.communicate(timeout=300)
    if child.returncode == 0:
        with pytest.raises(AssertionError):
            check_order(json.loads((tmp_path / "diary.json").read_text()))
    else:
        assert "AssertionError" in err
        assert "told" in err
