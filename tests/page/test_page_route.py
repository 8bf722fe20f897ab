"""The page over HTTP: its headers, who may load it, and that it is the one of its sources."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import perdure
from decode.observed import toy
from perdure.server.core.keys import Keys, new_key
from server.live_server import live_server, opened

ROOT = Path(__file__).resolve().parents[2]
WEB = ROOT / "web"
BUILT = Path(perdure.__file__).parent / "server" / "page"
HTML = {"accept": "text/html,*/*;q=0.8"}
"""What a browser says that it wants."""
LARGEST = 170 << 10
"""Bytes of all scripts together, compressed."""


def paths_in(html: str) -> list[str]:
    return re.findall(r'(?:src|href)="([^"]+)"', html)


def test_the_page_has_a_strict_policy_and_loads_without_a_key() -> None:
    _, key = new_key("alice")
    with (
        opened(toy()) as rt,
        live_server(rt, keys=Keys([key])) as server,
        server.client() as client,
    ):
        index = client.get("/", headers=HTML)
        assert index.status_code == 200
        assert index.headers["content-type"].startswith("text/html")
        files = [client.get(path) for path in paths_in(index.text)]
        assert files
        for answer in (index, *files):
            assert answer.status_code == 200, answer.url
            headers = answer.headers
            policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
            assert policy["default-src"] == "'none'"
            assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
            assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
            assert policy["frame-src"] == "'self'"
            assert policy["require-trusted-types-for"] == "'script'"
            assert "unsafe" not in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"
            assert headers["cross-origin-opener-policy"] == "same-origin"
            assert headers["x-frame-options"] == "DENY"
        assert index.headers["cache-control"] == "no-cache"
        assert all("immutable" in answer.headers["cache-control"] for answer in files)
        assert "<script>" not in index.text
        assert "style=" not in index.text
        for path in ("/v1/sessions", "/v1/machine", "/v1/requests", "/v1/cache/tree"):
            assert client.get(path).status_code == 401
        for path in ("/page/none.js", "/page/..%2f..%2fapp.py", "/page/"):
            assert client.get(path).status_code == 404


@pytest.mark.extension("inspection")
def test_the_frame_of_an_analysis_runs_its_own_scripts_and_reaches_nothing() -> None:
    """I3: it has no origin, and none of the server's data."""
    _, key = new_key("alice")
    with opened(toy()) as rt, live_server(rt, keys=Keys([key])) as server, server.client() as client:
        frame = client.get("/page/analysis")
    assert frame.status_code == 200
    rules = frame.headers["content-security-policy"].split("; ")
    policy = dict(part.split(" ", 1) for part in rules)
    assert policy["sandbox"] == "allow-scripts"
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["frame-ancestors"] == "'self'"
    assert re.fullmatch(r"'sha256-[\w+/=]{44}' 'sha256-[\w+/=]{44}'", policy["script-src"])
    # The first is the frame's own script, to the letter.
    [script] = re.findall(r"<script>(.*?)</script>", frame.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy["script-src"].startswith(f"'sha256-{digest}'")
    assert frame.headers["x-frame-options"] == "SAMEORIGIN"
    assert frame.headers["x-content-type-options"] == "nosniff"


def test_a_page_of_another_origin_gets_nothing_of_it() -> None:
    """I3: also not by a name that is pointed at this machine."""
    with opened(toy()) as rt, live_server(rt) as server, server.client() as client:
        for headers in (
            {"host": "evil.example"},
            {"origin": "https://evil.example"},
            {"sec-fetch-site": "cross-site"},
        ):
            assert client.get("/", headers={**HTML, **headers}).status_code == 403


def test_it_can_be_turned_off() -> None:
    with opened(toy()) as rt, live_server(rt, page=False) as server, server.client() as client:
        assert "<html" not in client.get("/", headers=HTML).text
        assert client.get("/page/none.js").status_code == 404
        assert client.get("/health").status_code == 200


def digests(root: Path, names: list[str]) -> dict[str, str]:
    return {name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in names}


def test_the_built_files_are_those_of_the_sources() -> None:
    """Without Node: by the digests that the build has written down."""
    manifest = json.loads((BUILT / "manifest.json").read_text())
    files = ["index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts"]
    sources = [path.relative_to(WEB).as_posix() for path in (WEB / "src").rglob("*") if path.is_file()]
    assert manifest["sources"] == digests(WEB, [*sources, *files]), (
        "the page is older than web/: run `make page`"
    )
    built = [path.relative_to(BUILT).as_posix() for path in BUILT.rglob("*") if path.is_file()]
    assert manifest["built"] == digests(BUILT, [name for name in built if name != "manifest.json"])


def _node(*command: str) -> subprocess.CompletedProcess[str]:
    npm = shutil.which("npm")
    if npm is None or not (WEB / "node_modules").is_dir():
        pytest.skip("needs Node and `npm install` in web/")
    return subprocess.run([npm, *command], cwd=WEB, capture_output=True, text=True)


def test_building_the_sources_again_gives_the_same_files(tmp_path: Path) -> None:
    before = {path.relative_to(BUILT): path.read_bytes() for path in BUILT.rglob("*") if path.is_file()}
    done = _node("exec", "--", "vite", "build", "--outDir", str(tmp_path / "page"), "--logLevel", "error")
    assert done.returncode == 0, done.stderr + done.stdout
    built = tmp_path / "page"
    after = {path.relative_to(built): path.read_bytes() for path in built.rglob("*") if path.is_file()}
    assert before == after


def test_the_units_of_the_page_hold() -> None:
    done = _node("test")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_scripts_are_small() -> None:
    scripts = list((BUILT / "page").glob("*.js"))
    assert scripts
    assert sum(len(gzip.compress(path.read_bytes(), 9)) for path in scripts) <= LARGEST


def test_nothing_of_the_page_names_another_host() -> None:
    lock = (WEB / "package-lock.json").read_text()
    assert '"resolved"' not in lock
    html = (BUILT / "index.html").read_text()
    assert all(path.startswith("/page/") for path in paths_in(html))
