"""State and long prompts on a device, in a process of its own: `python -m bench.processes.device`."""

from __future__ import annotations

import ctypes
import statistics
import time
from typing import Any, TypedDict

import numpy as np

from bench.child import serve


class Times(TypedDict):
    """Seconds, of ours and of what it is held against."""

    ours: list[float]
    peer: list[float]


def tokens(count: int, seed: int = 0) -> list[int]:
    return [(7919 * (index + 1) * (seed + 3) + 311 * seed) % 49_000 + 259 for index in range(count)]


class Device:
    """One model, opened once."""

    def open(self, path: str) -> str:
        import perdure
        from perdure.engine.llama.native import library

        self._perdure = perdure
        self._model = perdure.Model(path)
        return " and ".join(each.shown for each in library.loaded().device_list if each.offloads) or "CPU"

    def save(self, length: int, repeats: int) -> dict[str, Any]:
        """`Context.save` and `load` against the library's own copy into memory that is touched already."""
        with self._model.context(n_ctx=length + 256, n_seq=2) as context:
            context.decode(tokens(length))
            core: Any = context._core
            lib, native = core._lib, core._context
            size = int(lib.llama_state_seq_get_size_ext(native, 0, 0))
            touched = np.zeros(size, np.uint8)
            address = ctypes.cast(touched.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
            saving: Times = {"ours": [], "peer": []}
            loading: Times = {"ours": [], "peer": []}
            for _ in range(repeats):
                saving["peer"].append(
                    _timed(lambda: lib.llama_state_seq_get_data_ext(native, address, size, 0, 0))
                )
                loading["peer"].append(
                    _timed(lambda: lib.llama_state_seq_set_data_ext(native, address, size, 0, 0))
                )
                started = time.perf_counter()
                state = context.save(0)
                saving["ours"].append(time.perf_counter() - started)
                loading["ours"].append(_timed(lambda state=state: context.load(state, seq=1)))
            fork = [_timed(lambda: context.fork(0, 1)) for _ in range(repeats)]
            return {"bytes": size, "save": saving, "load": loading, "fork": fork}

    def swap(self, length: int, repeats: int) -> dict[str, Any]:
        """Two conversations that take turns on one slot: what a turn of one token takes besides computing."""
        settings: dict[str, Any] = {"n_ctx": length + 256, "slots": 1}
        found: dict[str, Any] = {"first": [], "again": []}
        with self._perdure.open(self._model, cache=16 << 30, **settings) as runtime:
            prompts = [tokens(length, seed) for seed in (1, 2)]
            for prompt in prompts:
                runtime.generate(prompt, max_tokens=1, temperature=0)
            for number in range(2 * repeats):
                prompt = prompts[number % 2]
                taken = _timed(
                    lambda prompt=prompt: found.update(
                        reuse=str(runtime.generate([*prompt, 300], max_tokens=1, temperature=0).reuse)
                    )
                )
                found["first" if number < 2 else "again"].append(taken)
            # The same turn where nothing has to be moved.
            found["stay"] = [
                _timed(lambda: runtime.generate([*prompts[1], 300], max_tokens=1, temperature=0))
                for _ in range(repeats + 1)
            ][1:]
        return found

    def keep(self, folder: str, length: int, n_ctx: int) -> dict[str, float]:
        """Compute a prompt and leave its state on the disk: seconds to its first token, and to close."""
        with self._stored(folder, n_ctx) as runtime:
            runtime.generate(tokens(600, 9), max_tokens=1, temperature=0)
            cold = _timed(lambda: runtime.generate(tokens(length, length), max_tokens=1, temperature=0))
            started = time.perf_counter()
        return {"cold": cold, "closing": time.perf_counter() - started}

    def wake(self, folder: str, length: int, n_ctx: int) -> dict[str, Any]:
        """The first token of a prompt that an earlier process has kept on the disk, with warm pages."""
        with self._stored(folder, n_ctx) as runtime:
            runtime.generate([300, 301, 302], max_tokens=1)
            started = time.perf_counter()
            reply = runtime.generate([*tokens(length, length), 300], max_tokens=1, temperature=0)
            return {"woken": time.perf_counter() - started, "reuse": str(reply.reuse)}

    def _stored(self, folder: str, n_ctx: int) -> Any:
        return self._perdure.open(self._model, store=folder, store_bytes=64 << 30, n_ctx=n_ctx, slots=2)

    def beside(self, length: int, repeats: int) -> dict[str, Any]:
        """A long prompt alone, and beside a reply that goes on: seconds, and the reply's gaps."""
        found: dict[str, Any] = {"alone": [], "beside": [], "worst": [], "median": []}
        with self._perdure.open(self._model, n_ctx=length + 256, slots=2, cache=0) as runtime:
            for number in range(repeats + 1):
                alone = _timed(lambda n=number: runtime.generate(tokens(length, 20 + n), max_tokens=1))
                running = runtime.submit(tokens(32), ignore_eos=True, seed=1)
                deltas = iter(running)
                for _ in range(16):
                    next(deltas)
                started = last = time.perf_counter()
                late = runtime.submit(tokens(length, 40 + number), max_tokens=1)
                gaps = []
                while not late.done:
                    next(deltas)
                    now = time.perf_counter()
                    gaps.append(now - last)
                    last = now
                seconds = time.perf_counter() - started
                running.cancel()
                running.replies()
                # The first one learns how fast prompts are read here.
                if number:
                    values = (alone, seconds, max(gaps), statistics.median(gaps))
                    for name, value in zip(("alone", "beside", "worst", "median"), values, strict=True):
                        found[name].append(value)
        return found


def _timed(call: Any) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    device = Device()
    serve({name: getattr(device, name) for name in ("open", "save", "swap", "keep", "wake", "beside")})
