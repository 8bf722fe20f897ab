"""An option is said once: a made-up one, added where it is defined, is on every surface."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest
from tools import engine_keywords, option_tables

from perdure.chat.options import ChatOptions, TurnKeywords
from perdure.config import SETTINGS
from perdure.decode.request import ReplyKeywords, SamplingKeywords
from perdure.decode.sampling.grammar import Grammar
from perdure.engine.inspection import StepLogits
from perdure.engine_config import EngineConfig, engine_options
from perdure.engine_config.keywords import EngineKeywords
from perdure.events.event import Observer
from perdure.options import options_of
from perdure.request_options import RequestOptions, Sampling

ROOT = Path(__file__).parent.parent

MADE_UP = """
import dataclasses, json, sys
from dataclasses import dataclass

# Where a setting is defined: a field, before any surface is made.
from perdure import request_options
from perdure.options import option, options_of

@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(request_options.Sampling):
    smoothing: float = option(0.0, low=0, high=8, help="made up: takes this much off the largest logit")

request_options.Sampling = Sampling

# And a stage that reads it.
import numpy as np
from perdure.decode.sampling import sampler
from perdure.decode.sampling.stage import Steering

class Smoothing(Steering):
    settings = ("smoothing",)

    def __init__(self, amount):
        self.amount = amount

    @classmethod
    def of(cls, sampling, scope):
        return cls(sampling.smoothing) if sampling.smoothing else None

    def apply(self, row):
        row[row.argmax()] -= np.float32(self.amount)

sampler.STAGES = (Smoothing, *sampler.STAGES)

# The draw.
row = np.array([3.0, 2.0, 0.0], np.float32)
draws = []
for amount in (0.0, 5.0):
    each = sampler.Sampler(Sampling(temperature=0, smoothing=amount), n_ctx=8)
    draws.append(sampler.draw([(each, each.select(row), 0)])[0])
assert draws == [0, 1], draws
from perdure.decode.sampling.sampler import CompiledChain
assert CompiledChain.of(each) is None, "the compiled path must not run a stage that it does not know"

# The library.
import perdure
from perdure.decode.request import Request
assert Request.of([1], smoothing=2.0).sampling.smoothing == 2.0
try:
    Request.of([1], smoothing=9.0)
except perdure.SamplingError as error:
    assert "smoothing is a number from 0 to 8" in str(error)
else:
    raise AssertionError("out of range")

# The command, its config file, and what is typed in a chat.
import typer
from perdure.cli.app import app
from perdure.cli.options.groups import REPLY_OPTIONS
from perdure.config import find_setting, parse_setting
group = typer.main.get_command(app)
for command in ("run", "chat", "serve"):
    assert "--smoothing" in {name for each in group.commands[command].params for name in each.opts}, command
assert parse_setting("smoothing", "2") == 2.0
assert find_setting("smoothing").variable == "PERDURE_SMOOTHING"
assert REPLY_OPTIONS["smoothing"].parse("2") == 2.0

# Every protocol, and the page.
from perdure.server.app import served
from perdure.server.core.server_state import ServerState
from perdure.testing.toy import ToyModel
from fastapi.testclient import TestClient

said = [{"role": "user", "content": "hi"}]
bodies = {
    "/v1/chat/completions": {"messages": said, "max_tokens": 1},
    "/v1/completions": {"prompt": "hi", "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1, "store": False},
    "/v1/messages": {"messages": said, "max_tokens": 1},
}
with perdure.open(ToyModel(), n_ctx=128, slots=1) as rt:
    state = ServerState(runtime=rt, name="toy", hosts=None)
    with TestClient(served(state), base_url="http://localhost") as client:
        for path, body in bodies.items():
            good = client.post(path, json={**body, "smoothing": 2.0})
            assert good.status_code == 200, (path, good.text)
            assert "x-perdure-ignored" not in good.headers, path
            assert client.post(path, json={**body, "smoothing": 9.0}).status_code == 400, path
        for value, status in ((2.0, 200), (9.0, 400)):
            chat = {"messages": said, "stream": False, "options": {"num_predict": 1, "smoothing": value}}
            assert client.post("/api/chat", json=chat).status_code == status
        assert "smoothing" in {each["name"] for each in client.get("/v1/options").json()["data"]}

# The docs.
from tools import engine_keywords, option_tables
assert "| `smoothing` | `0` | a number from 0 to 8 | made up:" in option_tables.text()
print("on every surface")
"""


@pytest.mark.extension("completions")
def test_a_made_up_setting_is_on_every_surface() -> None:
    command = [sys.executable, "-c", MADE_UP]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert ended.stdout.strip() == "on every surface", ended.stdout + ended.stderr


# The engine: a field is added to a copy of the source, and to the engine that reads it.

FIELD = """    heat: int | Literal["auto"] | None = option(
        None, low=1, high=9, usual=3, help="made up: how warm the toy is", metavar="N|auto"
    )
"""
MADE_UP_ENGINE_OPTION = """
import inspect, json, sys
import perdure
from pathlib import Path
from perdure.testing.toy import ToyModel
from tools import engine_keywords, option_tables

# The library, in this process and in a worker; what is wrong is said first.
assert "heat" in inspect.signature(perdure.open).parameters
assert "heat: int | Literal[\\"auto\\"] | None" in engine_keywords.keywords()
assert "- `heat`: made up: how warm the toy is (default: 3)." in engine_keywords.opening()
with perdure.open(ToyModel(), n_ctx=64, slots=1, heat=7) as rt:
    assert rt.cache.identity().kernels == "heat 7"
with perdure.open("perdure.testing.toy:ToyModel", n_ctx=64, slots=1, heat=8, isolated=True) as rt:
    assert rt.cache.identity().kernels == "heat 8"
for wrong in ({"heat": 0}, {"heat": "cold"}):
    try:
        perdure.open("/nowhere.gguf", **wrong)
    except perdure.InvalidInputError as error:
        assert "heat is a whole number from 1, or auto, got" in str(error)
    else:
        raise AssertionError(wrong)

# Another process with the store has to agree.
from perdure.engine_config import EngineConfig
assert EngineConfig(heat=7).distinctive == {"heat": 7}

# One of several models: as a text, and in TOML.
from perdure.server.pool import ModelPool, read_selection
path = Path(sys.argv[1]) / "models.toml"
path.write_text('[models.a]\\nfile = "perdure.testing.toy:ToyModel"\\nctx = 64\\nheat = 5\\n')
[spec] = read_selection([str(path)]).models
[same] = read_selection(["a=perdure.testing.toy:ToyModel,ctx=64,heat=5"]).models
assert spec.config == same.config == EngineConfig(n_ctx=64, heat=5)
pool = ModelPool.open([spec], EngineConfig(heat=2, slots=1))
try:
    assert pool.default.runtime.cache.identity().kernels == "heat 5"
finally:
    pool.close()

# The command, and the config file.
import typer
from perdure.cli.app import app
from perdure.cli.options.groups import ChatEngine
from perdure.config import find_setting, parse_setting
group = typer.main.get_command(app)
for command in ("run", "chat", "serve"):
    assert "--heat" in {name for each in group.commands[command].params for name in each.opts}, command
assert ChatEngine(heat="6").config == EngineConfig(heat=6)
assert parse_setting("heat", "auto") == "auto" and parse_setting("heat", 4) == 4
assert find_setting("heat").variable == "PERDURE_HEAT"

# The cluster's file, and the docs.
from perdure.ext.cluster.ray.config import ClusterConfig
ClusterConfig.from_dict({"store": "postgresql://h/d", "engine": {"heat": 4, "template": "chatml"}})
for engine, said in (({"heat": 0}, "heat is"), ({"haet": 4}, "did you mean 'heat'")):
    try:
        ClusterConfig.from_dict({"store": "postgresql://h/d", "engine": engine})
    except perdure.InvalidInputError as error:
        assert "[engine]" in str(error) and said in str(error), error
    else:
        raise AssertionError(engine)
assert "| `heat` * | 3 | a whole number from 1, or auto | made up:" in option_tables.text()
print("on every surface")
"""


def test_a_made_up_engine_option_is_on_every_surface(tmp_path: Path) -> None:
    source = tmp_path / "src"
    shutil.copytree(ROOT / "src" / "perdure", source / "perdure", ignore=shutil.ignore_patterns("*.pyc"))
    definition = source / "perdure" / "engine_config" / "__init__.py"
    put(definition, "    swa_full: bool | None = option(", FIELD)
    engine = source / "perdure" / "testing" / "toy" / "model.py"
    put(engine, "        **unknown: Never,\n", "        heat: int = 3,\n")
    text = engine.read_text(encoding="utf-8")
    engine.write_text(text.replace('kernels="python"', 'kernels=f"heat {heat}"'), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(source), str(tmp_path)))}
    # The tools write beside the source that they stand with.
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    (tmp_path / "docs").mkdir()

    def python(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        ended = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300
        )
        return ended.stdout.strip() + ended.stderr

    assert python("-m", "tools.engine_keywords") == ""
    assert python("-c", MADE_UP_ENGINE_OPTION, str(tmp_path)) == "on every surface"


def put(file: Path, before: str, text: str) -> None:
    """Insert a text into a file, once."""
    whole = file.read_text(encoding="utf-8")
    assert whole.count(before) == 1, before
    file.write_text(whole.replace(before, text + before), encoding="utf-8")


@pytest.mark.extension("speculation")
def test_what_editors_read_of_the_engine_is_what_the_definition_says() -> None:
    assert engine_keywords.KEYWORDS.read_text(encoding="utf-8") == engine_keywords.keywords(), (
        "run `make api`"
    )
    assert engine_keywords.OPENING.read_text(encoding="utf-8") == engine_keywords.opening(), "run `make api`"
    hints = get_type_hints(EngineKeywords)
    assert hints.keys() == engine_options().keys()
    assert all(hints[name] == kind for name, kind in get_type_hints(EngineConfig).items() if name in hints)


def test_an_engine_option_stands_in_few_files() -> None:
    """The definition, what is written from it, the engine that reads it, and what stored state has."""
    kernel = [file for file in (ROOT / "src").rglob("*.py") if "ext" not in file.parts]
    named = [file for file in kernel if re.search(r"\bk_type\b", file.read_text(encoding="utf-8"))]
    assert len(named) <= 6, named


def test_keywords_have_the_names_and_types_of_the_definition() -> None:
    assert get_type_hints(SamplingKeywords) == get_type_hints(Sampling)
    # Imported by the kernel for type checkers alone.
    names = {each.__name__: each for each in (Grammar, StepLogits)} | {"Observer": Observer}
    replies, turns = (get_type_hints(each, localns=names) for each in (ReplyKeywords, TurnKeywords))
    defined = get_type_hints(RequestOptions)
    for name, each in options_of(RequestOptions).items():
        # One stop may be given without a list around it.
        assert each.name in replies
        assert name == "stops" or replies[name] == defined[name]
    chat = get_type_hints(ChatOptions)
    assert all(turns[name] == chat[name] for name in options_of(ChatOptions))


def test_the_config_file_has_every_sampling_setting_with_its_help() -> None:
    said = {setting.name: setting.about for setting in SETTINGS}
    for each in options_of(Sampling).values():
        assert said[each.name] == each.help
    assert said["max_tokens"] == options_of(RequestOptions)["max_tokens"].help


@pytest.mark.extension("speculation")
def test_the_page_of_options_is_what_the_definitions_say() -> None:
    assert option_tables.PAGE.read_text(encoding="utf-8") == option_tables.text(), "run `make api`"
    assert option_tables.SECURITY.read_text(encoding="utf-8") == option_tables.security(), "run `make api`"


def test_a_sampling_setting_stands_in_few_files() -> None:
    """The definition, the keywords, its stage; the other surfaces are made from it."""
    files = (ROOT / "src").rglob("*.py")
    named = [file for file in files if "min_p" in file.read_text(encoding="utf-8")]
    assert len(named) <= 4, named


def test_every_option_has_a_range_and_one_line_of_help() -> None:
    for kind in (Sampling, RequestOptions, ChatOptions, EngineConfig):
        for each in options_of(kind).values():
            assert each.range, each.name
            assert 10 < len(each.help) < 100, each.name
            assert not each.help.endswith("."), each.name
