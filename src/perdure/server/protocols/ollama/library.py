"""What Ollama's clients ask about models: the one that is served, under the names that it has."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from perdure.errors import PerdureError
from perdure.server.core.app_state import AppState
from perdure.server.protocols.ollama.stream import rfc3339

VERSION = "0.13.5"
"""Of Ollama's API: clients ask for one that they can work with."""
_FOR_EVER = timedelta(days=36500)


class Library:
    """The served model as Ollama's clients see it."""

    def __init__(self, app_state: AppState) -> None:
        self._app_state = app_state
        self._model = app_state.runtime.model
        self._info = self._model.info

    @property
    def _started(self) -> datetime:
        return datetime.fromtimestamp(self._app_state.started, UTC)

    def listed(self) -> dict[str, Any]:
        """As an entry of a list."""
        name = tagged(self._app_state.name)
        return {
            "name": name,
            "model": name,
            "modified_at": rfc3339(self._started),
            "size": self._app_state.model_bytes,
            "digest": self._model.digest,
            "details": self._details(),
            "capabilities": self._capabilities(),
        }

    def running(self) -> dict[str, Any]:
        """As an entry of what is loaded: it stays for as long as the server runs."""
        n_ctx = self._app_state.runtime.n_ctx
        expires = rfc3339(self._started + _FOR_EVER)
        return {**self.listed(), "expires_at": expires, "size_vram": 0, "context_length": n_ctx}

    def shown(self) -> dict[str, Any]:
        n_ctx = self._app_state.runtime.n_ctx
        architecture = self._info.architecture
        info: dict[str, Any] = {
            name: _plain(value)
            for name, value in self._model.metadata.items()
            if len(value) < 1000 and value != self._info.template
        }
        info["general.architecture"] = architecture
        # What can be used here, whatever the model was trained for: clients plan by it.
        info[f"{architecture}.context_length"] = n_ctx
        return {
            "modelfile": f"FROM {self._app_state.name}\nPARAMETER num_ctx {n_ctx}\n",
            "parameters": f"num_ctx                        {n_ctx}",
            "template": self._template(),
            "details": self._details(),
            "model_info": info,
            "capabilities": self._capabilities(),
            "modified_at": rfc3339(self._started),
        }

    def pulled(self) -> list[dict[str, Any]]:
        """What is told of a pull. Nothing is fetched for a client: the model is there."""
        digest = f"sha256:{self._model.digest}"
        size = self.listed()["size"]
        return [
            {"status": "pulling manifest"},
            {"status": f"pulling {digest[7:19]}", "digest": digest, "total": size, "completed": size},
            {"status": "verifying sha256 digest"},
            {"status": "writing manifest"},
            {"status": "success"},
        ]

    def _details(self) -> dict[str, Any]:
        info = self._info
        return {
            "parent_model": "",
            "format": info.file_format or "gguf",
            "family": info.architecture,
            "families": [info.architecture],
            "parameter_size": info.size_label,
            "quantization_level": info.quantisation or "unknown",
            "context_length": self._app_state.runtime.n_ctx,
        }

    def _capabilities(self) -> list[str]:
        found = ["completion", "embedding"]
        try:
            chat_format = self._app_state.runtime.chat_format
        except PerdureError:
            return found
        if chat_format.call_form.shown:
            found.append("tools")
        if chat_format.family.reasoning is not None:
            found.append("thinking")
        return found

    def _template(self) -> str:
        try:
            return self._app_state.runtime.chat_format.template.source
        except PerdureError:
            return ""


def tagged(name: str) -> str:
    """A name with its tag."""
    return name if ":" in name else f"{name}:latest"


def _plain(value: str) -> Any:
    if value in ("true", "false"):
        return value == "true"
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value
