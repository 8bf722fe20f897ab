"""Moving a conversation: export a session to one file, and import it into another store."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import perdure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a .gguf file or a name (default: the default model)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        here, there = Path(folder) / "here", Path(folder) / "there"
        with perdure.open(options.model, store=here, n_ctx=512) as runtime:
            session = runtime.session("movable", system="You are terse.", max_tokens=16)
            session.say("Name a colour.")
            session.say("And another?")
            file = session.export(Path(folder) / "movable.session")
            print(f"{file.stat().st_size} bytes")
            print(session.transcript("markdown"))
        with perdure.open(options.model, store=there, n_ctx=512) as runtime:
            result = runtime.sessions.import_(file, "arrived")
            # State of another store is left out unless trust_state=True; it is computed when it is needed.
            print(f"{result.turns} turns, {result.tokens} tokens; left out: {result.left_out}")
            print(result.session.say("And a third?", max_tokens=16).text)


if __name__ == "__main__":
    main()
