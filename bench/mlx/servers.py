"""`perdure serve`, mlx-lm's and mlx-vlm's servers over one folder, each in a process, and one client."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

Message = dict[str, str]


class Server:
    """A server in a process of its own, which can be started anew."""

    def __init__(self, kind: str, folder: Path, place: Path) -> None:
        self.kind = kind
        self._folder = str(folder.absolute())
        self._store = str(place / f"{kind} store")
        self._log = (place / f"{kind}.log").open("ab")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._log.close()

    def start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        if self.kind == "perdure":
            words = ["perdure.cli", "serve", "-m", self._folder, "--ctx", "2048", "--slots", "4"]
            words += ["--store", self._store]
        elif self.kind == "mlx-vlm":
            words = ["mlx_vlm.server", "--model", self._folder, "--host", "127.0.0.1"]
        else:
            words = ["mlx_lm", "server", "--model", self._folder, "--max-tokens", "8"]
        command = [sys.executable, "-m", *words, "--port", str(self._port)]
        self._process = subprocess.Popen(
            command,
            stdout=self._log,
            stderr=self._log,
            # mlx-vlm has its cache, and where that is, from its environment.
            env={**os.environ, "APC_ENABLED": "1", "APC_DISK_PATH": self._store},
        )
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                if httpx.get(f"{self._url}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.2)
        said = Path(self._log.name).read_text(errors="replace")[-500:]
        raise RuntimeError(f"{self.kind} did not start: {said}")

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def ask(self, messages: Sequence[Message], count: int) -> tuple[float, str]:
        """Milliseconds to the first text of a reply, and the reply."""
        asked: dict[str, Any] = {
            "model": self._folder if self.kind != "perdure" else Path(self._folder).name,
            "messages": list(messages),
            "max_tokens": count,
            "temperature": 0,
            "stream": True,
        }
        first, text = 0.0, ""
        started = time.perf_counter()
        with httpx.stream("POST", f"{self._url}/v1/chat/completions", json=asked, timeout=900) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{self.kind}: {answer.read()[:300]!r}")
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                choices = json.loads(line.removeprefix("data: ")).get("choices") or [{}]
                said = (choices[0].get("delta") or {}).get("content") or ""
                if said and not first:
                    first = time.perf_counter() - started
                text += said
        return (first or time.perf_counter() - started) * 1e3, text
