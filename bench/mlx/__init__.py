"""MLX: our engine against mlx-lm's loop, prompt cache and server, and mlx-vlm's server with its disk cache.

    python -m bench.mlx                  # 8 minutes on two idle cores
    python -m bench.mlx.agreement        # greedy replies against llama.cpp's on the same weights: 15 minutes

The default model, dequantised once into build/mlx. On a CPU mlx-lm compiles its kernels, as it is shipped;
our engine does not (it would need a compiler). mlx-vlm is measured where it is installed.

The Linux wheel of MLX brings a plain BLAS, 50 times as slow as OpenBLAS: `LD_PRELOAD=libopenblas.so.0` gives
all sides that one.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import perdure
from bench.engine import model_path
from bench.harness import Bench, Figure, Gauge, Pairs, Run, at_least
from bench.machine import Watch
from bench.mlx.servers import Message, Server
from perdure.engine.registry import open_model
from perdure.ext.mlx import packages

_SENTENCE = "The harbour lies still this morning, and the ferry comes in at ten past nine with the mail. "
_QUESTIONS = ("Name a colour.", "And a city?", "Why?", "Say it shorter.", "Thank you.")


def plain() -> Path:
    """The default model as a GGUF file in f16, written once."""
    from perdure.ext.weights.quantize import quantize

    place = Path("build/mlx") / f"{Path(model_path()).stem}.f16.gguf"
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        quantize(Path(model_path()), place, "F16", requantize=True)
    return place


def folder() -> Path:
    """The same weights as a folder, written once: in 32 bits, since the CPU is slowest at 16."""
    from tools.mlx_folder import write

    place = plain().with_suffix("")
    if not (place / "model.safetensors").exists():
        write(plain(), place, "float32")
    return place


def _theirs(place: Path) -> Any:
    packages.load()
    from mlx_lm.utils import load_model

    return load_model(place)[0]


def _their_tokens(
    model: Any, tokens: list[int], count: int, cache: Any = None
) -> tuple[list[float], list[int]]:
    """When each token of mlx-lm's own loop came, and which."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    mx.enable_compile()
    try:
        found = generate_step(mx.array(tokens), model, max_tokens=count, prompt_cache=cache)
        came = [(time.perf_counter(), int(token)) for token, _ in found]
        return [at for at, _ in came], [token for _, token in came]
    finally:
        mx.disable_compile()


def decode(run: Run) -> Iterator[Figure]:
    """Tokens a second in one stream, against mlx-lm's loop."""
    place, count = folder(), run.pick(32, 6)
    model, peer = open_model(place, {}, cells=0), _theirs(place)
    tokens = model.tokenize(_SENTENCE)
    with perdure.open(model, n_ctx=512, slots=1) as rt:

        def ours() -> float:
            stream = rt.stream(tokens, max_tokens=count, temperature=0, loop_guard=0)
            times = [time.perf_counter() for delta in stream if delta.tokens]
            return (len(times) - 1) / (times[-1] - times[0])

        def theirs() -> float:
            times, _ = _their_tokens(peer, tokens, count)
            return (len(times) - 1) / (times[-1] - times[0])

        yield run.compare(
            "generate in one stream",
            ours=ours,
            peer=theirs,
            against="mlx-lm's loop",
            unit="tokens/s",
            gauge=Gauge.RATE,
            target=at_least(0.97),
            repeats=run.pick(5, 3),
        )


def turns(run: Run) -> Iterator[Figure]:
    """The first token of turn 5 of 4 conversations, against mlx-lm's server's prompt cache."""
    import mlx.core as mx
    from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache

    place, talks = folder(), run.pick(4, 1)
    model, peer = open_model(place, {}, cells=0), _theirs(place)
    kept = LRUPromptCache()
    texts = [model.tokenize(f"{number}. {_SENTENCE}") for number in range(talks)]
    more = [model.tokenize(question) for question in _QUESTIONS]
    ours: list[float] = []
    theirs: list[float] = []
    with Watch() as watch, perdure.open(model, n_ctx=512, slots=talks) as rt:
        for question in more:
            for number in range(talks):
                texts[number] = [*texts[number], *question]
                started = time.perf_counter()
                reply = list(rt.stream(texts[number], max_tokens=1, temperature=0))
                took = time.perf_counter() - started
                cache, rest = kept.fetch_nearest_cache("model", texts[number])
                cache = make_prompt_cache(peer) if cache is None else cache
                started = time.perf_counter()
                _, token = _their_tokens(peer, list(rest), 1, cache)
                if question is more[-1]:
                    ours.append(took * 1e3)
                    theirs.append((time.perf_counter() - started) * 1e3)
                mx.eval([each.keys for each in cache])
                # Its loop has read the new token, too.
                kept.insert_cache("model", [*texts[number], *token], copy.deepcopy(cache))
                assert reply
    yield Figure(
        name=f"first token of turn 5, {talks} conversations",
        against="mlx-lm's prompt cache",
        unit="ms",
        gauge=Gauge.COST,
        pairs=Pairs(tuple(ours), tuple(theirs)),
        target=at_least(1.0),
        machine=watch.machine,
    )


def servers(run: Run) -> Iterator[Figure]:
    """Over HTTP, against mlx-lm's server and mlx-vlm's: turn 5 of 4 conversations, and one after a restart.

    mlx-lm's server keeps its prompt cache in memory alone: after a restart it reads the whole conversation
    again. mlx-vlm's has a cache on disk.
    """
    place, talks = folder(), run.pick(4, 2)
    kinds = ["perdure", "mlx-lm", *(["mlx-vlm"] if find_spec("mlx_vlm") else [])]
    if "mlx-vlm" not in kinds:
        print("  mlx-vlm is not installed, and so not measured: pip install mlx-vlm", flush=True)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as running:
        sides = [running.enter_context(Server(kind, place, Path(scratch))) for kind in kinds]
        said: dict[str, list[list[Message]]] = {
            side.kind: [
                [{"role": "system", "content": f"{number}. {_SENTENCE * run.pick(10, 1)}"}]
                for number in range(talks)
            ]
            for side in sides
        }
        taken: dict[str, list[float]] = {side.kind: [] for side in sides}
        with Watch() as watch:
            for turn, question in enumerate(_QUESTIONS):
                for number in range(talks):
                    for side in sides[:: 1 if number % 2 else -1]:
                        talk = said[side.kind][number]
                        talk.append({"role": "user", "content": question})
                        first, text = side.ask(talk, 8)
                        talk.append({"role": "assistant", "content": text})
                        if turn == len(_QUESTIONS) - 1:
                            taken[side.kind].append(first)
        for kind in kinds[1:]:
            yield Figure(
                name=f"first token of turn 5 of {talks} conversations, over HTTP",
                against=f"{kind}'s server",
                unit="ms",
                gauge=Gauge.COST,
                pairs=Pairs(tuple(taken["perdure"]), tuple(taken[kind])),
                target=at_least(1.0),
                machine=watch.machine,
            )
        again: dict[str, list[float]] = {side.kind: [] for side in sides}
        with Watch() as watch:
            for side in sides:
                talk = [{"role": "system", "content": _SENTENCE * run.pick(50, 4)}]
                talk.append({"role": "user", "content": _QUESTIONS[0]})
                talk.append({"role": "assistant", "content": side.ask(talk, 4)[1]})
                talk.append({"role": "user", "content": _QUESTIONS[1]})
                for _ in range(run.pick(2, 1)):
                    side.stop()
                    side.start()
                    # The first request warms up what is not about this conversation.
                    side.ask([{"role": "user", "content": "Hi"}], 1)
                    again[side.kind].append(side.ask(talk, 1)[0])
        for kind in kinds[1:]:
            yield Figure(
                name=f"first token after a restart, behind {run.pick(50, 4) * 21:,} tokens, over HTTP",
                against=f"{kind}'s server",
                unit="ms",
                gauge=Gauge.COST,
                pairs=Pairs(tuple(again["perdure"]), tuple(again[kind])),
                target=at_least(10 if kind == "mlx-lm" and not run.quick else 1),
                machine=watch.machine,
            )


def restart(run: Run) -> Iterator[Figure]:
    """The first token of a stored session after a restart, by its length, against reading it again, and
    against mlx-lm's `cache_prompt`, which writes a prompt's cache as a file for the next process.

    A length that this machine would read for more than 45 seconds is left out.
    """
    model, peer = open_model(folder(), {}, cells=0), _theirs(folder())
    _their_tokens(peer, model.tokenize(_SENTENCE), 2)
    a_token = 0.0
    for sentences in run.pick((4, 50, 150), (4, 12)):
        text = _SENTENCE * sentences
        count = len(model.tokenize(text))
        # Attention makes a token behind more tokens dearer.
        if 1.5 * a_token * count > 45e3:
            print(f"  a session of {count:,} tokens is left out: it is read too slowly here", flush=True)
            continue
        woken, loaded, computed, watch = _after_a_restart(model, peer, text, run.pick(5, 2))
        a_token = computed / count
        for against, costs, least in (
            ("reading it", [computed] * len(woken), 10 if count > 500 else 1),
            # The session's turn has the marks of the chat template besides, and is kept on disk.
            ("mlx-lm's cache_prompt", loaded, 1),
        ):
            yield Figure(
                name=f"first token of a session of {count:,} tokens after a restart",
                against=against,
                unit="ms",
                gauge=Gauge.COST,
                pairs=Pairs(tuple(woken), tuple(costs)),
                target=at_least(least),
                machine=watch.machine,
            )


def _after_a_restart(
    model: Any, peer: Any, text: str, repeats: int
) -> tuple[list[float], list[float], float, Watch]:
    """Milliseconds to the first token of a second turn: woken by ours, and loaded by mlx-lm's; and what it
    took us to read the first turn."""
    from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

    question, room = model.tokenize(_QUESTIONS[1]), 4608
    woken: list[float] = []
    loaded: list[float] = []
    with tempfile.TemporaryDirectory() as place:
        with perdure.open(model, n_ctx=room, slots=1, store=place) as rt:
            rt.generate("Hi", max_tokens=2)
            session = rt.session("a")
            started = time.perf_counter()
            session.say(text, max_tokens=1, temperature=0)
            computed = (time.perf_counter() - started) * 1e3
        file = str(Path(place) / "prompt.safetensors")
        cache = make_prompt_cache(peer)
        _their_tokens(peer, model.tokenize(text), 1, cache)
        save_prompt_cache(file, cache)

        def ours() -> float:
            with perdure.open(model, n_ctx=room, slots=1, store=place) as rt:
                session = rt.session("a")
                started = time.perf_counter()
                session.say(_QUESTIONS[1], max_tokens=1, temperature=0)
                return (time.perf_counter() - started) * 1e3

        def theirs() -> float:
            started = time.perf_counter()
            _their_tokens(peer, question, 1, load_prompt_cache(file))
            return (time.perf_counter() - started) * 1e3

        with Watch() as watch:
            for _ in range(repeats):
                woken.append(ours())
                loaded.append(theirs())
    return woken, loaded, computed, watch


main = Bench("mlx", (decode, turns, restart, servers))
