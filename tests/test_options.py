"""An option is said once: a made-up one, added where it is defined, is on every surface."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

from tools import option_tables

from perdure.chat.options import ChatOptions, TurnKeywords
from perdure.config import SETTINGS
from perdure.decode.request import ReplyKeywords, SamplingKeywords
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
from perdure.server.core.app_state import AppState
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
    state = AppState(runtime=rt, name="toy", hosts=None)
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
from tools import option_tables
assert "| `smoothing` | `0` | a number from 0 to 8 | made up:" in option_tables.text()
print("on every surface")
"""


def test_a_made_up_setting_is_on_every_surface() -> None:
    command = [sys.executable, "-c", MADE_UP]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert ended.stdout.strip() == "on every surface", ended.stdout + ended.stderr


def test_keywords_have_the_names_and_types_of_the_definition() -> None:
    assert get_type_hints(SamplingKeywords) == get_type_hints(Sampling)
    replies, turns = get_type_hints(ReplyKeywords), get_type_hints(TurnKeywords)
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


def test_the_page_of_options_is_what_the_definitions_say() -> None:
    assert option_tables.PAGE.read_text(encoding="utf-8") == option_tables.text(), "run `make api`"
    assert option_tables.SECURITY.read_text(encoding="utf-8") == option_tables.security(), "run `make api`"


def test_a_sampling_setting_stands_in_few_files() -> None:
    """The definition, the keywords, its stage; the other surfaces are made from it."""
    files = (ROOT / "src").rglob("*.py")
    named = [file for file in files if "min_p" in file.read_text(encoding="utf-8")]
    assert len(named) <= 4, named


def test_every_option_has_a_range_and_one_line_of_help() -> None:
    for kind in (Sampling, RequestOptions, ChatOptions):
        for each in options_of(kind).values():
            assert each.range, each.name
            assert 10 < len(each.help) < 100, each.name
            assert not each.help.endswith("."), each.name
