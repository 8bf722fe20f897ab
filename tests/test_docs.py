"""The pages stay true: snippets run, commands exist, links and paths lead somewhere, the reference is new."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
import subprocess
import sys
import tomllib
import unicodedata
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from tools import source_tree

from cli.pty_user import piped

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
GENERATED = ("api.md", "options.md", "source_tree.md", "CHANGELOG.md")
UNREAD = ("security.md",)
"""Not shortened yet."""
WRITTEN = [page for page in PAGES if page.name not in (*GENERATED, *UNREAD)]
USERS = [page for page in WRITTEN if page == ROOT / "README.md" or page.parent == DOCS]
"""Not those for maintainers, and the measurements."""
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
RUN = (
    ROOT / "README.md",
    ROOT / "docs" / "quickstart.md",
    ROOT / "docs" / "fit.md",
    ROOT / "docs" / "inspection.md",
)
"""Pages whose snippets run here. Others have tests of their own, beside what they are about."""


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", read(page), re.DOTALL)


def prose(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"```.*?```", "", read(page), flags=re.DOTALL)


def snippets() -> list[tuple[Path, str]]:
    return [(page, code) for page in RUN for code in blocks(page, "python")]


def commands() -> list[str]:
    pages = (*RUN, ROOT / "CONTRIBUTING.md")
    lines = [
        line.split(" # ")[0].strip() for page in pages for b in blocks(page, "sh") for line in b.splitlines()
    ]
    return list(dict.fromkeys(line.split(" | ")[-1] for line in lines if line))


@cache
def help_of(*command: str) -> str:
    environment = {**os.environ, "COLUMNS": "200"}
    if command[:2] == ("-m", "perdure.cli"):
        told = piped(environment, None, *command[2:], "--help", cwd=ROOT)
        assert told.returncode == 0, told.stderr
        return told.stdout
    done = subprocess.run(
        [sys.executable, *command, "--help"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize(
    ("page", "code"), snippets(), ids=[f"{page.stem}-{at}" for at, (page, _) in enumerate(snippets())]
)
def test_a_snippet_runs(
    page: Path,
    code: str,
    zoo_path: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PERDURE_MODEL", str(zoo_path("llama")))
    monkeypatch.chdir(tmp_path)
    exec(compile(code, page.name, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("command", commands())
def test_a_command_and_its_options_exist(command: str) -> None:
    words = shlex.split(command)
    if words[0] in ("pip", "pipx"):
        assert words[1] == "install"
        assert words[2].partition("[")[0] == ".", "not published: install the folder"
        return
    if words[0] == "make":
        subprocess.run([*words, "--dry-run"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return
    if words[0] == "perdure":
        deep = 3 if words[1] in ("models", "config") else 2
        shown = help_of("-m", "perdure.cli", *words[1:deep])
    else:
        assert words[0] == "python"
        shown = help_of(*words[1 : 3 if words[1] == "-m" else 2])
    for option in (word for word in words if word.startswith("--")):
        assert re.search(rf"{option}\b", shown), f"{command}: no {option}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_installs_is_published(page: Path) -> None:
    """perdure itself is not on PyPI: a block installs the folder, with extras that there are."""
    extras = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]["optional-dependencies"]
    for block in blocks(page, "sh"):
        assert not re.search(r"pipx? install [^\n]*\bperdure\b", block), f"{page.name}: pip install ."
        for names in re.findall(r"'\.\[([\w,]+)\]'", block):
            assert set(names.split(",")) <= set(extras)


def test_there_are_snippets_and_commands_to_check() -> None:
    assert len(snippets()) >= 9
    assert len(commands()) >= 15


# Links.


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub and the site make them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        text = unicodedata.normalize("NFKD", heading.strip().lower()).encode("ascii", "ignore").decode()
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip()))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} leads nowhere"
        if page.is_relative_to(DOCS):
            # The site has nothing else, and its build stops at a link that leaves it.
            assert target.resolve().is_relative_to(DOCS), f"{link} leads out of the site: write `{path}`"
        if anchor:
            assert anchor in anchors(target), f"{link}: {target.name} has no such heading"


def test_the_check_sees_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    """Planted."""
    page = tmp_path / "page.md"
    page.write_text("# One heading\n\n[there](#one-heading) [nowhere](no.md)\n")
    assert anchors(page) == {"one-heading"}
    with pytest.raises(AssertionError, match=r"no\.md leads nowhere"):
        test_the_links_of_a_page_lead_somewhere(page)


@pytest.mark.parametrize(
    "page",
    [
        ROOT / "CONTRIBUTING.md",
        ROOT / "docs" / "architecture.md",
        *(ROOT / "docs" / "internals").glob("*.md"),
    ],
    ids=lambda page: page.stem,
)
def test_the_modules_that_a_page_names_exist(page: Path) -> None:
    names = re.findall(r"`((?:[\w.]+/)*[\w]+(?:/|\.py))`", read(page))
    assert names
    there = [*ROOT.glob("src/**/*"), *ROOT.glob("tests/**/*"), *ROOT.glob("tools/*"), *ROOT.glob("*")]
    ends = [f"/{path.relative_to(ROOT).as_posix()}" for path in there if "__pycache__" not in path.parts]
    for name in names:
        assert any(end.endswith(f"/{name.rstrip('/')}") for end in ends), f"{page.name} names {name}"


def test_the_modules_that_the_map_of_a_folder_names_exist() -> None:
    """The docstring of a package says what is in it, a line each: a name, spaces, and what that is."""
    named, gone = 0, []
    for file in (ROOT / "src").rglob("__init__.py"):
        text = ast.get_docstring(ast.parse(read(file))) or ""
        there = {path.stem for path in file.parent.rglob("*") if "__pycache__" not in path.parts}
        for name in re.findall(r"^ *([a-z_]+)/? {2,}\S", text, re.MULTILINE):
            named += 1
            gone += [] if name in there else [f"{file.parent.name}: {name}"]
    assert named > 100
    assert gone == []


def stops() -> list[tuple[str, str]]:
    """The files and functions in the tables of the tour."""
    tour = read(DOCS / "internals" / "tour.md")
    return re.findall(r"^\| \d \| `([\w/]+\.py)` \| `([\w.]+)` \|", tour, re.MULTILINE)


def test_the_functions_that_the_tour_stops_at_exist() -> None:
    assert len(stops()) == 18
    for file, name in stops():
        body = ast.parse((ROOT / "src" / "perdure" / file).read_text()).body
        for part in name.split("."):
            [definition] = [node for node in body if isinstance(node, DEFINITIONS) and node.name == part]
            body = definition.body


# The site and the reference.


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = set(re.findall(r"([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    there = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert listed == there


def test_the_first_page_links_every_other() -> None:
    """A page that docs/index.md does not link is not found."""
    linked = set(re.findall(r"\]\(([\w/]+\.md)(?:#[\w-]+)?\)", read(DOCS / "index.md")))
    there = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} - {"index.md"}
    assert there - linked == set()


@pytest.mark.parametrize("page", USERS, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_for_users_is_no_diary(page: Path) -> None:
    """Dates, loads and test commands of measurements stand in docs/measurements."""
    diary = r"\(2026-|, 2026-1|on 2026-|\bload of \d|pytest "
    assert re.findall(rf"[^\n]*(?:{diary})[^\n]*", prose(page)) == []


def sentences(page: Path) -> Iterator[str]:
    """Of paragraphs, list items and cells of tables, without code blocks and the addresses of links."""
    text = re.sub(r"\]\([^)]*\)", "]", prose(page))
    text = re.sub(r"^\s*\|", "\n\n", text, flags=re.MULTILINE)
    for part in re.split(r"\n\s*\n|^#.*$|^\s*(?:[-*]|\d+\.) | \| |\|$", text, flags=re.MULTILINE):
        yield from re.split(r"(?<=[.!?:])[)\"*`]*\s+(?=[A-Z`\[\"*(])", part)


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_is_longer_than_48_words(page: Path) -> None:
    """Longer ones are read twice."""
    assert [s for s in sentences(page) if len(s.split()) > 48] == []


def test_the_reference_is_what_signatures_and_docstrings_say() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "api_reference.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_tree_of_the_sources_is_what_docstrings_say() -> None:
    assert read(source_tree.PAGE) == source_tree.text(), "run `python tools/source_tree.py`"
    assert all(sentence for _, sentence in source_tree.rows())


def test_what_clients_can_do_is_said_by_tests() -> None:
    """Every cell of the tables names a test that there is."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "client_table.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_docstring_of_open_lists_every_option_once() -> None:
    """`perdure.open` has one line for each keyword."""
    import perdure

    text = inspect.getdoc(perdure.open) or ""
    listed = [
        name
        for line in re.findall(r"^- ([^:]+):", text, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", line)
    ]
    assert sorted(listed) == sorted(set(inspect.signature(perdure.open).parameters) - {"model", "unknown"})


def test_every_public_name_is_in_the_reference() -> None:
    import perdure

    text = read(ROOT / "docs" / "api.md")
    for name in perdure.__all__:
        if not name.startswith("_"):
            assert re.search(rf"(### `{name}`|\b{name}\b)", text), name
