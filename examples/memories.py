"""Memories: label points of a conversation, find one again, and go on from it in a session of its own."""

from __future__ import annotations

import argparse
import tempfile

import perdure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a .gguf file or a name (default: the default model)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as store:
        with perdure.open(options.model, store=store, n_ctx=512) as runtime:
            session = runtime.session("research", max_tokens=16)
            session.say("Water boils at 100 degrees.")
            session.label("water", kind="fact", note="boiling, at sea level")
            session.say("Iron melts at 1538 degrees.")
            session.label("iron", kind="fact", note="melting")
        # Another process would find them as well.
        with perdure.open(options.model, store=store, n_ctx=512) as runtime:
            [memory] = runtime.memories.search(kind="fact", text="boiling")
            print(f"found {memory.address}: {memory.note}")
            session = runtime.memories.wake(memory.address, "back at water")
            reply = session.say("And at high altitude?", max_tokens=16)
            print(f"{reply.text!r}, {reply.usage.cached_tokens} prompt tokens reused")


if __name__ == "__main__":
    main()
