"""Makes and drops native objects in many orders: `python -m promises.lifetimes WHAT ZOO`.

Every native object that is made is counted, and must be freed exactly once.
"""

from __future__ import annotations

import gc
import itertools
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from perdure import ClosedError, Context, Model, PerdureError
from perdure.engine.llama.native import library
from promises.kinds import prompt


class Counted:
    """A shim over the library's calls that make and free: what is alive, and how often each was called."""

    def __init__(self) -> None:
        self.alive: set[int] = set()
        self.calls: Counter[str] = Counter()
        lib = library.load()
        for make in ("llama_init_from_model", "llama_model_load_from_file"):
            setattr(lib, make, self._maker(make, getattr(lib, make)))
        for free in ("llama_free", "llama_model_free"):
            setattr(lib, free, self._freer(free, getattr(lib, free)))
        for never in ("llama_batch_init", "llama_batch_free", "llama_batch_get_one"):
            setattr(lib, never, lambda *args, never=never: self.calls.update([never]))

    def _maker(self, name: str, native: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any) -> Any:
            made = native(*args)
            if made:
                self.calls[name] += 1
                self.alive.add(_address(made))
            return made

        return make

    def _freer(self, name: str, native: Callable[..., Any]) -> Callable[..., Any]:
        def free(handle: Any) -> None:
            self.calls[name] += 1
            # Checked before the call: the second free of a pair would end the process.
            assert _address(handle) in self.alive, f"{name} of something that is not alive"
            self.alive.remove(_address(handle))
            native(handle)

        return free

    def settle(self) -> None:
        gc.collect()
        assert not self.alive, f"{len(self.alive)} native objects were never freed"
        assert self.calls["llama_init_from_model"] == self.calls["llama_free"]
        assert self.calls["llama_model_load_from_file"] == self.calls["llama_model_free"]
        assert not [name for name in self.calls if "batch" in name]
        print("settled", dict(self.calls))


def _address(handle: Any) -> int:
    return int(getattr(handle, "value", handle))


def orders(folder: Path) -> None:
    """Every order in which a model, a context, a view, a borrowed array and an adapter can go."""
    counted = Counted()
    names = ("model", "ctx", "view", "row", "lora")
    for order in itertools.permutations(names):
        print("case", *order, flush=True)
        model = Model(folder / "llama.gguf")
        ctx = model.context(n_ctx=16, threads=1)
        lora = model.adapter(folder / "llama-lora.gguf")
        ctx.adapt({lora: 1.0})
        ctx.decode(prompt(4))
        view = ctx.logits()
        borrowed = view.borrow()
        row = borrowed.__enter__()
        expected = row.tolist()
        things: dict[str, Any] = {
            "model": model,
            "ctx": ctx,
            "view": view,
            "row": (borrowed, row),
            "lora": lora,
        }
        del model, ctx, view, borrowed, row, lora
        for name in order:
            if name == "row":
                assert things["row"][1].tolist() == expected
            del things[name]
            if "row" in things:
                assert things["row"][1].tolist() == expected
    counted.settle()


ACTIONS = (
    *("model", "context", "context", "decode", "decode", "view", "raise", "refuse", "close", "close"),
    *("close model", "drop", "drop model", "collect", "cycle", "twice", "refused file"),
)


def fuzz(folder: Path) -> None:
    """Random makings, closings, failures and collections."""
    counted = Counted()
    dice = random.Random(7)
    models: list[Model] = []
    contexts: list[Context] = []
    kept: list[Any] = []
    for step in range(1000):
        action = dice.choice(ACTIONS)
        print("case", step, action, flush=True)
        try:
            if action == "model" and len(models) < 4:
                models.append(Model(folder / "llama.gguf"))
            elif action == "context" and models and len(contexts) < 6:
                contexts.append(dice.choice(models).context(n_ctx=32, n_seq=2, n_batch=8, threads=1))
            elif action == "decode" and contexts:
                dice.choice(contexts).decode(prompt(dice.randrange(1, 20)), seq=dice.randrange(2))
            elif action == "view" and contexts:
                kept.append(dice.choice(contexts).logits())
            elif action == "raise" and contexts:
                with dice.choice(contexts) as ctx:
                    ctx.decode([-1])
            elif action == "refuse" and models:
                dice.choice(models).context(n_ctx=2**40)
            elif action == "close" and contexts:
                dice.choice(contexts).close()
            elif action == "close model" and models:
                dice.choice(models).close()
            elif action == "drop" and contexts:
                contexts.pop(dice.randrange(len(contexts)))
            elif action == "drop model" and models:
                models.pop(dice.randrange(len(models)))
            elif action == "collect":
                kept.clear()
                gc.collect()
            elif action == "cycle" and contexts:
                knot: list[Any] = [contexts.pop()]
                knot.append(knot)
                del knot
            elif action == "twice" and contexts:
                ctx = contexts.pop()
                ctx.close()
                ctx.close()
                del ctx
            elif action == "refused file":
                Model(folder / "llama-lora.gguf")
        except PerdureError:
            continue
    # The names of the loop must not outlive the lists.
    ctx = None  # type: ignore[assignment]
    models.clear()
    contexts.clear()
    kept.clear()
    counted.settle()


def cycles(folder: Path) -> None:
    """2,000 contexts made, used and closed or dropped: memory stays where it was."""
    process = psutil.Process()
    model = Model(folder / "llama.gguf")
    after = {}
    for count in range(1, 2001):
        ctx = model.context(n_ctx=16, threads=1)
        if count % 4 == 0:
            ctx.decode([1, 2, 3])
            ctx.logits().argmax()
        if count % 2:
            ctx.close()
        del ctx
        if count in (500, 2000):
            after[count] = process.memory_info().rss
    print("grew", after[2000] - after[500])


def closing(folder: Path) -> None:
    """A context closed 1,000 times while another thread decodes on it."""
    counted = Counted()
    model = Model(folder / "llama.gguf")
    ended: Counter[str] = Counter()
    for turn in range(1000):
        if turn % 100 == 0:
            print("case", turn, flush=True)
        ctx = model.context(n_ctx=64, n_batch=4 + turn % 9, threads=1)
        started = threading.Event()

        def work(ctx: Context = ctx, started: threading.Event = started) -> None:
            try:
                while True:
                    ctx.decode([1])
                    started.set()
                    ctx.decode(prompt(50))
                    ctx.clear()
            except ClosedError:
                ended["closed"] += 1
            except BaseException as error:
                ended[repr(error)] += 1

        worker = threading.Thread(target=work)
        worker.start()
        assert started.wait(60)
        # Some are closed at once, others wherever in its loop the worker has got to by then.
        for _ in range(turn % 7):
            ctx.length()
        ctx.close()
        worker.join()
        assert ctx.closed
        del work, ctx, worker
    assert ended == {"closed": 1000}, ended
    del model
    counted.settle()


if __name__ == "__main__":
    {"orders": orders, "fuzz": fuzz, "cycles": cycles, "closing": closing}[sys.argv[1]](Path(sys.argv[2]))
