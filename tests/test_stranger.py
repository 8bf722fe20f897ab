"""An extension of somebody else, as a wheel that is installed: each thing that it brings is there, and one
that is broken takes nothing else away."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import httpx
import pytest

import perdure
from homes import new_home
from perdure.extension import Extension, extensions

PACKAGE = Path(__file__).parent / "stranger"
PAGE = Path(__file__).parents[1] / "docs" / "extensions.md"
SOURCE = Path(perdure.__file__).parents[1]
TIER = """
import json
from contextlib import closing

import numpy as np

from perdure import Sampling
from perdure.backend import BlockStorage, LocalBackend
from perdure.cache.tiers.base import tier_opener
from perdure.decode.request import Request
from perdure.decode.stream import Stream, one_request
from perdure.engine_config import EngineConfig
from perdure.spi.cache import Block, BlockId
from perdure.spi.testing import ToyModel

opener = tier_opener("drawer://one")
tier = opener.open("drawer://one", key=b"", identity=b"")
block = Block.make(BlockId(bytes(32)), 0, np.arange(4, dtype=np.int32), np.ones((4, 8), np.uint8), None)
held = tier.store([block]), tier.load(block.id).tokens.tolist()

reuse = []
for _ in range(2):
    config = EngineConfig(n_ctx=512, slots=1, blocks=["drawer://two"])
    storage = BlockStorage(shared_key=b"k" * 32)
    with closing(LocalBackend(ToyModel(), config, storage=storage)) as backend:
        sampling = Sampling(temperature=0)
        request = Request(prompt=list(range(1, 200)), max_tokens=4, sampling=sampling, ignore_eos=True)
        with Stream(one_request(request), backend.submit) as stream:
            reuse.append(dict(stream.reply().reuse.tiers))

print(json.dumps({"held": held, "reuse": reuse, "redis": type(tier_opener("redis://x")).__module__}))
"""


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the stranger's wheel was installed into."""
    folder = tmp_path_factory.mktemp("stranger")
    # What building leaves behind stays out of the sources.
    package = shutil.copytree(PACKAGE, folder / "package", ignore=shutil.ignore_patterns("__pycache__"))
    return installed(package, folder)


def installed(package: Path, folder: Path) -> Path:
    """Where pip put the wheel of a package."""
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, package],
        check=True,
        capture_output=True,
    )
    [wheel] = folder.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    subprocess.run([*pip, "--target", folder / "site", wheel], check=True, capture_output=True)
    return folder / "site"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_home(tmp_path_factory.mktemp("home"))


def variables(home: Path, *folders: Path) -> dict[str, str]:
    """Of a process that finds packages in `folders`, and perdure here."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PERDURE_", "PYTHON"))}
    path = os.pathsep.join(map(str, (*folders, SOURCE)))
    return {**kept, "PYTHONPATH": path, "PERDURE_HOME": str(home), "COLUMNS": "200", "NO_PROXY": "127.0.0.1"}


def python(home: Path, *arguments: str, sites: tuple[Path, ...]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=variables(home, *sites), cwd=home
    )


def command(home: Path, *arguments: str, sites: tuple[Path, ...]) -> subprocess.CompletedProcess[str]:
    return python(home, "-m", "perdure.cli", *arguments, sites=sites)


@contextmanager
def serving(home: Path, *sites: Path, model: str = "stranger:bird") -> Iterator[str]:
    """`perdure serve` while the block runs; the block gets its address."""
    with subprocess.Popen(
        [sys.executable, "-m", "perdure.cli", "serve", model, "--port", "0", "--ctx", "512"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=variables(home, *sites),
        cwd=home,
    ) as child:
        assert child.stdout is not None
        try:
            said = iter(child.stdout.readline, "")
            found = (re.search(r"http://127\.0\.0\.1:\d+", line) for line in said)
            yield next(match[0] for match in found if match)
        finally:
            child.terminate()


# What it brings.


def test_its_command_runs_and_is_listed(stranger: Path, home: Path) -> None:
    done = command(home, "hello", "Ada", sites=(stranger,))
    assert (done.returncode, done.stdout) == (0, "hello Ada\n"), done.stderr
    listed = command(home, "--help", sites=(stranger,)).stdout
    assert re.search(r"^Strangers:\n  hello +Greet somebody\.$", listed, re.MULTILINE), listed
    # Nothing of ours is missing.
    usual = command(home, "--help", sites=()).stdout
    assert set(usual.splitlines()) <= set(listed.splitlines())


def test_a_command_whose_name_is_taken_stays_ours(stranger: Path, home: Path) -> None:
    """Whether it is a part of the command or of an extension of ours."""
    for name in ("ls", "train"):
        ours = command(home, name, "--help", sites=()).stdout
        done = command(home, name, "--help", sites=(stranger,))
        assert done.stdout == ours
        assert "Greet" not in ours
    assert "extension stranger: no command train: that name is taken" in done.stderr


def test_its_engine_and_its_route_are_served(stranger: Path, home: Path) -> None:
    with serving(home, stranger) as url, httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        reply = client.post("/v1/chat/completions", json=asked).raise_for_status().json()
        assert reply["model"] == "bird"
        assert reply["usage"]["completion_tokens"] == 4
        assert client.get("/v1/hello").raise_for_status().json() == {"hello": "toy"}
        assert "/v1/hello" in client.get("/openapi.json").json()["paths"]


def test_its_tier_holds_blocks_and_gives_them_back_to_an_engine(stranger: Path, home: Path) -> None:
    """And a scheme that one of ours opens stays ours."""
    done = python(home, "-c", TIER, sites=(stranger,))
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["held"] == [1, [0, 1, 2, 3]]
    assert shown["reuse"] == [{}, {"drawer": 198}]
    assert shown["redis"] == "perdure.ext.cluster.shared"


@pytest.mark.extension("machine")
def test_doctor_names_it_and_has_its_check(stranger: Path, home: Path) -> None:
    done = command(home, "doctor", "--json", sites=(stranger,))
    findings = {each["name"]: each for each in json.loads(done.stdout)}
    assert findings["extensions"]["state"] == "ok"
    assert findings["extensions"]["found"] == ", ".join([*extensions(), "stranger"])
    assert findings["stranger"]["found"] == "was here"


def test_without_it_nothing_of_it_exists(home: Path) -> None:
    assert command(home, "hello", sites=()).returncode == 2
    assert "stranger:bird" in command(home, "show", "stranger:bird", sites=()).stderr
    done = python(home, "-c", TIER, sites=())
    assert "a place for blocks begins with file://, redis://" in done.stderr


# One that is broken.

HELLO = """
from perdure.cli.app import start
from perdure.extension import extensions

try:
    start(["hello"])
finally:
    print(*extensions())
"""
FIELDS = 'from perdure.spi import Extension\nEXTENSION = Extension(name="broken", '
BROKEN = {
    "import": ("import a_library_of_nobody", "No module named 'a_library_of_nobody'"),
    "raises": ("raise ValueError('no such machine')", "broken:EXTENSION cannot be imported: no such machine"),
    "attribute": ("VALUE = 1", "has no attribute 'EXTENSION'"),
    "type": ("EXTENSION = 'text'", "broken:EXTENSION is no Extension, it is a str"),
    "keyword": (FIELDS + "colour=7)", "unexpected keyword argument 'colour'"),
    "needs": (FIELDS + 'needs=("nobody",))', "it needs nobody"),
    "name": (FIELDS.replace('"broken"', '"mlx"') + ")", "broken:EXTENSION is named mlx, and so is another"),
}


def install(folder: Path, name: str, source: str) -> Path:
    """A package of one module with an extension, as pip would leave it in a folder."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[perdure.extensions]\n{name} = {name}:EXTENSION\n")
    (folder / f"{name}.py").write_text(source)
    return folder


@pytest.mark.parametrize(("source", "reason"), BROKEN.values(), ids=BROKEN)
def test_one_that_is_broken_is_left_out_with_one_line(
    stranger: Path, home: Path, tmp_path: Path, source: str, reason: str
) -> None:
    sites = (stranger, install(tmp_path, "broken", source))
    done = python(home, "-c", HELLO, sites=sites)
    assert done.stdout.splitlines() == ["hello world", " ".join([*extensions(), "stranger"])], done.stderr
    [line] = [line for line in done.stderr.splitlines() if "broken" in line]
    assert "extension broken is left out: " in line
    assert reason in line


def test_what_needs_one_that_is_left_out_is_left_out_too(home: Path, tmp_path: Path) -> None:
    install(tmp_path, "first", FIELDS.replace("broken", "first") + 'needs=("second",))')
    install(tmp_path, "second", FIELDS.replace("broken", "second") + 'needs=("third",))')
    done = python(home, "-c", "import perdure.extension as e; print(e.left_out())", sites=(tmp_path,))
    assert ast.literal_eval(done.stdout) == (("second", "it needs third"), ("first", "it needs second"))


@pytest.mark.extension("machine")
def test_doctor_says_which_is_left_out_and_why(home: Path, tmp_path: Path) -> None:
    sites = (install(tmp_path, "broken", FIELDS + 'needs=("nobody",))'),)
    done = command(home, "doctor", "--json", sites=sites)
    findings = [each for each in json.loads(done.stdout) if each["name"] == "extensions"]
    assert [each["state"] for each in findings] == ["ok", "warn"]
    assert findings[0]["found"] == ", ".join(extensions())
    assert findings[1]["found"] == "broken is left out: it needs nobody"
    assert "uninstall" in findings[1]["advice"]


def test_parts_that_cannot_be_imported_take_nothing_else_away(
    stranger: Path, home: Path, tmp_path: Path
) -> None:
    """Its value is right, and what it names is not there."""
    part = '("nowhere:x", "broken:VALUE"), '
    kinds = ("engines", "routes", "page_routes", "protocols", "checks")
    source = FIELDS + "".join(f"{kind}={part}" for kind in kinds) + 'stores={"nowhere": "nowhere:x"})'
    sites = (stranger, install(tmp_path, "broken", source))
    with serving(home, *sites) as url:
        answer = httpx.get(f"{url}/v1/hello", trust_env=False, timeout=60)
        assert answer.json() == {"hello": "toy"}
    done = command(home, "show", "stranger:bird", sites=sites)
    assert done.returncode == 0
    [first, second] = [line for line in done.stderr.splitlines() if "broken" in line]
    assert "extension broken goes without a part: nowhere:x names no part of an extension" in first
    assert "broken:VALUE" in second
    found = "from perdure.sessions.store.remote import remote_of_url as of; print(of('postgresql://x'))"
    assert "ext.cluster" in python(home, "-c", found, sites=sites).stdout


# The one of the page.


@pytest.fixture(scope="module")
def files_of_the_page() -> dict[str, str]:
    """The files that docs/extensions.md shows, by their names."""
    blocks = re.findall(
        r"^```(?:toml|python)\n# (\S+)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    return dict(blocks)


def test_the_example_of_the_page_runs(
    files_of_the_page: dict[str, str], home: Path, tmp_path: Path, zoo_path: Callable[[str], Path]
) -> None:
    for name, text in files_of_the_page.items():
        (tmp_path / "package" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "package" / name).write_text(text)
    sites = (installed(tmp_path / "package", tmp_path),)
    model = str(zoo_path("llama"))
    done = command(home, "count", "Hello there", "--model", model, sites=sites)
    count = re.fullmatch(r"([1-9]\d*) tokens\n", done.stdout)
    assert count is not None, done.stderr
    with serving(home, *sites, model=model) as url:
        answer = httpx.get(f"{url}/v1/count", params={"text": "Hello there"}, trust_env=False, timeout=60)
        assert answer.json() == {"tokens": int(count[1])}
    assert re.search(
        r"^Extensions:\n  count +Count the tokens of a text\.$",
        command(home, "--help", sites=sites).stdout,
        re.MULTILINE,
    )


def test_the_example_of_the_page_is_short(files_of_the_page: dict[str, str]) -> None:
    assert set(files_of_the_page) > {"pyproject.toml", "perdure_count/__init__.py"}
    lines = [line for name, text in files_of_the_page.items() for line in text.splitlines()]
    assert len([line for line in lines if line]) <= 45


def test_the_page_names_every_field_and_every_extension_of_ours() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert rows == [*(field.name for field in dataclasses.fields(Extension)), *extensions()]


# What it may import.


def test_it_imports_public_names_and_the_spi_alone() -> None:
    for file in (PACKAGE / "perdure_stranger").glob("*.py"):
        modules = re.findall(r"^(?:from|import) (perdure[\w.]*)", file.read_text(), re.MULTILINE)
        assert all(module == "perdure" or module.startswith("perdure.spi") for module in modules), file


def test_the_spi_is_names_of_others_and_nothing_else() -> None:
    folder = SOURCE / "perdure" / "spi"
    for file in folder.glob("*.py"):
        docstring, *imports = ast.parse(file.read_text()).body
        assert isinstance(docstring, ast.Expr)
        for each in imports:
            assert isinstance(each, ast.ImportFrom), file
            # Type checkers take what has `as` for a name of this module.
            assert all(name.asname == name.name for name in each.names), file
    listed = re.findall(r"^([a-z]+)  +\S", import_module("perdure.spi").__doc__ or "", re.MULTILINE)
    assert sorted(listed) == sorted(file.stem for file in folder.glob("*.py") if file.stem != "__init__")


@pytest.mark.parametrize(
    ("module", "names"),
    {
        "spi": ("Extension", "ExtensionCommand"),
        "spi.engine": ("Engine", "EngineModel", "Core", "Finding"),
        "spi.cache": ("BlockTier", "TierOpener"),
        "spi.sessions": ("RemoteStore", "SessionStore"),
        "spi.server": ("Protocol", "Writer", "KeyStore"),
        "spi.testing": ("ToyModel", "ToyCore", "Faults"),
    }.items(),
)
def test_what_an_extension_implements_is_in_the_spi(module: str, names: tuple[str, ...]) -> None:
    assert set(names) <= vars(import_module(f"perdure.{module}")).keys()
