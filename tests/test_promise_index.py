"""docs/internals/promises.md names tests for promises of security.md and server.md; this holds it to that."""

from __future__ import annotations

import functools
import re
from itertools import chain
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
GENERATED = r"<!-- (?:fields|tools/\S+) -->.*?<!-- end(?: of fields)? -->"
"""Tables that tools write of what tests say."""
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
WORDS = 9
"""By which a sentence is known."""

NO_PROMISES = {
    "security.md": """
What `perdure serve` defends against, what it leaves to
The library itself trusts its caller; this page is
you run it
in a container or a unit
A wrong key takes as long to refuse as
Slow bodies, slow readers, headers and connections are bounded
An application that Ray's own config file starts (`perdure.ext.cluster.ray.application:application`)
A program of another user of the machine can
What is shared is the machine: a busy neighbour
**Hosts and origins.** A browser can reach a server
what
looking inside a reply
A server without a store uses the system's temporary
State of what was deleted (numbers and token ids)
In PostgreSQL deleted rows go when its own VACUUM
What the model then makes of that text is
The socket between the two processes carries pickles.
It is a private pair of file descriptors and
State that was computed elsewhere is another matter: bytes
**Models** are read by llama.cpp, which is written in
Load models from people you trust.
**Terminals.** What the command shows of models, sessions and
JSON and pipes get the text as it is.
**The store** has everything that was said, in plain.
Back it up to a place that is protected
A store in PostgreSQL has the same in its
In Python:
encrypted (AES-256-GCM)

So on one machine, where sessions are in SQLite
It is one where sessions are in PostgreSQL on
What a file system or an SSD keeps of
It cannot be changed in place: clear, and start
What it costs:
`python -m bench.cluster --only encryption --quick` and `--only wake
On 2 idle cores (aarch64, Neoverse-N1, 2026-11-18, 88 MB)
The first token of a session of 502 tokens
Somebody who can read the folder of the store
Listening on the network, unless ports speak TLS (`--tls-cert`)
A caller with a key who uses all the
Give keys their limits: without them there are bounds
Prompt injection: a model does what text tells it.
Tools run in the client, never here; check their
Bugs in llama.cpp's kernels and in the GPU's driver.
`tests/server/test_intruders.py` has tests of attacks, `test_bounds.py` one of every
Three fuzzers run in `make soak`, and print their
It runs for an hour; `python -m server.fuzzing SECONDS`
It runs the tests of the row kernels on
The native layer can be run under AddressSanitizer without
See sessions for what an import takes and leaves
""",
    "server.md": """
`perdure serve` serves one model or several over HTTP:
security.md says what it defends against and what to
route
Any model gives them; one that was trained for
where its server is gone
`POST /v1/responses` is OpenAI's newer API.
`POST /v1/messages` and `POST /v1/messages/count_tokens` are Anthropic's API.
protocol
A restart forgets the marks.
in the request
field
A client whose connection broke does not know whether
OpenAI's and Anthropic's libraries send no key by themselves,
`extra_headers={"Idempotency-Key": str(uuid.uuid4())}`.
status
`deploy/` has a unit for systemd and a Dockerfile.
figure
limit
On 2 idle cores (Neoverse N1) with SmolLM2-135M the
On an NVIDIA H200 it writes 4.13 times as
The first token of turn 20 of a conversation
speed.md has the tables, measurements/server.md how they were measured.
""",
}
"""How sentences of a page begin that promise nothing (heads of tables, advice, definitions, figures), or what
a system, a terminal, PostgreSQL or Ray does."""


def statements(page: str) -> list[str]:
    """The beginnings of sentences, and the first cells of rows, without generated tables and code."""
    text = re.sub(rf"{GENERATED}|```.*?```", "\n\n", page, flags=re.DOTALL)
    found: list[str] = []
    for block in re.split(r"\n\s*\n|\n(?=[-*] |\|)", text):
        lines = block.strip()
        if lines.startswith("|"):
            cell = lines.split("|")[1].strip()
            found += [] if re.fullmatch(r"[-: ]*", cell) and cell else [cell]
        elif not lines.startswith("#"):
            sentences = re.split(r"(?<=[.!?:])\s+(?=[A-Z`*\[])", " ".join(lines.removeprefix("- ").split()))
            found += [sentence for sentence in sentences if sentence]
    return [" ".join(LINK.sub(r"\1", each).split()[:WORDS]) for each in found]


def rows() -> dict[str, dict[str, str]]:
    """The rows of the index, by page."""
    found: dict[str, dict[str, str]] = {}
    for part in (DOCS / "internals" / "promises.md").read_text().split("\n## ")[1:]:
        page, _, table = part.partition("\n")
        cells = [line.strip("|").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
        found[page] = {start.strip(): held.strip() for start, held in cells}
    return found


def test_every_promise_of_the_index_is_one_of_its_page() -> None:
    for page, index in rows().items():
        said = set(statements((DOCS / page).read_text()))
        assert set(index) <= said, page


@pytest.mark.parametrize("page", NO_PROMISES)
def test_every_sentence_has_a_test_or_promises_nothing(page: str) -> None:
    said = set(statements((DOCS / page).read_text()))
    held, others = set(rows()[page]), set(NO_PROMISES[page].strip("\n").splitlines())
    assert not held & others
    assert said == held | others


def test_every_test_of_the_index_exists() -> None:
    for index in rows().values():
        for held in index.values():
            for part in held.split("; "):
                assert missing(part) == set(), part


def test_every_file_and_test_of_the_mechanisms_exists() -> None:
    tables = (DOCS / "internals" / "mechanisms.md").read_text().split("\n## ")
    cells = [
        [line.strip("|").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
        for table in tables
    ]
    for _, file, _, held in chain(*cells):
        assert (TESTS.parent / "src" / "perdure" / file.strip("` ")).is_file(), file
        assert missing(held.strip()) == set(), held
    ids = {cell[0].strip().split(",")[0] for cell in cells[0]}
    assert ids == {f"Y{at}" for at in range(1, 28)} - {"Y21", "Y22"}


def missing(held: str) -> set[str]:
    """The tests that a row names and that its file has not."""
    file, _, names = held.partition("` ")
    return {f"test_{name}" for name in names.split(", ")} - names_in(TESTS / file.strip("`"))


@functools.cache
def names_in(path: Path) -> set[str]:
    return set(re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE))
