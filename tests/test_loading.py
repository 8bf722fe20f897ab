"""A first reply in a session loads no more of perdure than it needs; what else there is waits for a use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import perdure
from homes import new_home

MODULES, LINES = 120, 30_000
"""Of ours, at most."""
CODE = """
import json, sys
import perdure
with perdure.open(sys.argv[1], n_ctx=512) as rt:
    rt.session("a").say("hi", max_tokens=4)
ours = [name for name in sys.modules if name.partition(".")[0] == "perdure"]
print(json.dumps(sorted(ours)))
"""


@pytest.fixture(scope="module")
def loaded(zoo_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """The modules of ours that a first reply loads, with their lines."""
    home = new_home(tmp_path_factory.mktemp("loading") / "home")
    run = subprocess.run(
        [sys.executable, "-c", CODE, str(zoo_path("llama"))],
        env={**os.environ, "PERDURE_HOME": str(home)},
        capture_output=True,
        text=True,
        check=True,
    )
    return {name: lines_of(name) for name in json.loads(run.stdout)}


def lines_of(module: str) -> int:
    place = Path(perdure.__file__).parent.joinpath(*module.split(".")[1:])
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return len(file.read_text(encoding="utf-8").splitlines())


def test_a_first_reply_loads_few_modules(loaded: dict[str, int]) -> None:
    largest = sorted(loaded, key=loaded.__getitem__, reverse=True)
    assert len(loaded) <= MODULES, largest
    assert sum(loaded.values()) <= LINES, largest


@pytest.mark.parametrize(
    "part",
    [
        "cache.drop_plan",
        "cache.held_blocks",
        "cache.kept_prefixes",
        "cache.prefix_cache",
        "cache.slots.checkpoint_store",
        "cache.sorted_keys",
        "cache.tiers.opening",
        "cache.transfer",
        "chat.parsing.json_calls",
        "chat.parsing.prefill",
        "chat.plans",
        "chat.prefetch",
        "chat.template.rewriting",
        "chat.template.sizes",
        "decode.asyncio_reader",
        "decode.choice",
        "decode.exact_scheduler",
        "decode.sampling.grammar",
        "decode.sampling.rare_cuts",
        "decode.sampling.repetition",
        "decode.step_events",
        "engine.core",
        "engine.embedder",
        "engine.factory",
        "engine.inspection",
        "engine.llama.core_maker",
        "engine.llama.layer_plan",
        "engine.llama.scratch",
        "engine.logits",
        "engine.parallel",
        "engine.row_kernels.measures",
        "events.subscription",
        "ext",
        "models.adapter_file",
        "models.card",
        "models.finder",
        "models.ways_to_open",
        "sessions.fold",
        "sessions.memories",
        "sessions.pending_info",
        "sessions.responses",
        "sessions.store.base",
        "sessions.store.sql.files",
        "sessions.store.sql.memories",
        "sessions.store.sql.search",
        "sessions.store.sql.upkeep",
        "sessions.store.sqlite.folder",
        "sessions.tree",
        "store.block_schema",
        "store.table_check",
        "system.processes",
        "worker",
    ],
)
def test_what_it_does_not_use_is_not_loaded(part: str, loaded: dict[str, int]) -> None:
    assert f"perdure.{part}" not in loaded
