"""Compiles grammars in a process that may die, for `grammar_checker`: `python -P grammar_child.py PATH`.

Each line of input is a job, each line of output says that it ended: `slow` where a reply would hold up all
others, `ok` whatever else came of it.

    {"kind": "regex", "text": "[a-z]+", "n_vocab": 512, "marks": [[511, "<|im_end|>"]]}
    ok

Little of perdure is imported, so that it starts in 0.1 s.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
import threading
import time
from contextlib import suppress
from typing import Any

CPU_SECONDS = 2
"""For one job. Schemas that people write take milliseconds."""
STEP_SECONDS = 0.25
"""For one token: the replies of all clients wait for it."""
_BYTES = 2 << 30
"""Of address space, for all."""
_STACK = 1 << 20
"""Less than any thread of the engine has: what fits here fits there."""
_IDLE_SECONDS = 60.0
"""Without a job, after which it ends."""
_JOB_BYTES = 64 << 20
"""Of one line: grammars have less than 1 MB."""
_WALK = 16
"""Tokens of a reply that are tried behind the first mask."""


class Words:
    """A vocabulary of the same size and control tokens as the model's, where a character is a byte. How long
    a grammar takes to compile does not depend on the other tokens, which would take long to send."""

    def __init__(self, n_vocab: int, marks: tuple[tuple[int, str], ...]) -> None:
        self.tokens = [b""] * n_vocab
        for token, text in marks:
            self.tokens[token] = b"\xff" + text.encode("latin-1")
        free = (token for token, text in enumerate(self.tokens) if not text)
        for byte, token in zip(range(256), list(free), strict=False):
            self.tokens[token] = bytes([byte])
        self.special_token_ids = [token for token, _ in marks]
        self.eos_token_id = marks[0][0] if marks else 0
        self.bos_token_id = None
        self._of = {text: token for token, text in enumerate(self.tokens)}

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode("utf-8", "replace") if isinstance(text, str) else text
        return [self._of[part] for byte in data if (part := bytes([byte])) in self._of]


@functools.lru_cache(maxsize=4)
def tokenizer(n_vocab: int, marks: tuple[tuple[int, str], ...]) -> Any:
    import llguidance

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Words(n_vocab, marks)), n_vocab=n_vocab)


def compile_once(job: dict[str, Any]) -> str:
    """Do what the engine will do with a grammar. An error of it is the engine's to report."""
    import llguidance

    tokens = tokenizer(job["n_vocab"], tuple((token, text) for token, text in job["marks"]))
    definition = llguidance.grammar_from(job["kind"], job["text"])
    native = llguidance.LLMatcher(tokens, definition, log_level=0)
    # The engine does this once for all replies, and the rest for each.
    native.compute_bitmask()
    reply = native.deep_copy()
    if job["begins"]:
        reply.consume_tokens(tokens.tokenize_bytes(job["begins"].encode()))
    draw = random.Random(0)
    for _ in range(_WALK):
        start = time.process_time()
        reply.compute_ff_tokens()
        bits = reply.compute_bitmask()
        allowed = [
            at * 8 + bit for at, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1
        ]
        if reply.is_error() or reply.is_stopped() or not allowed:
            break
        reply.consume_token(draw.choice(allowed))
        if time.process_time() - start > STEP_SECONDS:
            return "slow"
    return "ok"


def serve() -> None:
    from perdure.system import processes

    source = sys.stdin.buffer
    while processes.wait_for_input(source, _IDLE_SECONDS) and (line := source.readline(_JOB_BYTES)):
        processes.limit_process(more_seconds=CPU_SECONDS, nbytes=_BYTES)
        answer = "ok"
        with suppress(ValueError, RecursionError):
            answer = compile_once(json.loads(line))
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


def serve_or_die() -> None:
    try:
        serve()
    except BaseException:
        # A panic of the library, out of memory: as if it had died of it.
        os._exit(1)


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])
    threading.stack_size(_STACK)
    worker = threading.Thread(target=serve_or_die)
    worker.start()
    worker.join()
