"""Files as Ollama keeps them."""

from __future__ import annotations

import json
from pathlib import Path


def put_ollama(folder: Path, name: str, data: bytes) -> Path:
    """A model as Ollama keeps it: a manifest by name, and a blob by digest."""
    base, _, tag = name.partition(":")
    digest = f"{sum(data):064x}"
    manifest = folder / "manifests" / "registry.ollama.ai" / "library" / base / (tag or "latest")
    manifest.parent.mkdir(parents=True, exist_ok=True)
    layers = [
        {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:00", "size": 1},
        {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}", "size": len(data)},
    ]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    blob = folder / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(exist_ok=True)
    blob.write_bytes(data)
    return blob
