"""The projector's file (mmproj): found beside a model, and judged before an encoder gets it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from perdure import InvalidInputError, ModelFileError
from perdure.spi.models import Header, read_parts

_ARCHITECTURE = "clip"
_MANY = 1000
"""Files of a folder that are looked at."""


@dataclass(frozen=True, slots=True)
class Projector:
    """A projector's file, and what it encodes."""

    path: Path
    kind: str
    images: bool
    sounds: bool

    @property
    def nbytes(self) -> int:
        """Of its file: the encoder's process takes about as much memory, and its buffers."""
        return self.path.stat().st_size

    def __str__(self) -> str:
        reads = " and ".join(
            what for what, there in (("images", self.images), ("sounds", self.sounds)) if there
        )
        return f"{self.path.name} ({self.kind or 'of no kind'}, {self.nbytes:,} bytes): {reads or 'nothing'}"


def find_projector(model: Path) -> Projector | None:
    """The projector beside a model: `mmproj` is in its name, and where there are several, all that it has
    besides is in the model's name, too; None where there is none."""
    folder = model.parent
    candidates = [
        path
        for path in sorted(folder.glob("*.gguf"))[:_MANY]
        if "mmproj" in path.name.lower() and path != model
    ]
    if len(candidates) > 1:
        # Those whose name says what the model's does; of these the one with the longest name in common.
        words = _words(model.name)
        named = [path for path in candidates if _words(path.name) <= words]
        candidates = sorted(named, key=lambda path: -len(_words(path.name)))[:1]
    return read_projector(candidates[0]) if candidates else None


def read_projector(path: Path) -> Projector:
    """What a projector's file says of itself; ModelFileError where it is none."""
    if not path.is_file():
        raise InvalidInputError(f"there is no projector {path}")
    metadata = _header(path).metadata
    if metadata.get("general.architecture") != _ARCHITECTURE:
        raise ModelFileError(
            f"{path.name} is no projector: it is a model of architecture "
            f"{metadata.get('general.architecture', 'unknown')}"
        )
    kind = metadata.get("clip.projector_type") or metadata.get("clip.vision.projector_type") or ""
    return Projector(
        path,
        str(kind),
        images=bool(metadata.get("clip.has_vision_encoder")),
        sounds=bool(metadata.get("clip.has_audio_encoder")),
    )


def _header(path: Path) -> Header:
    [header] = read_parts(path)
    return header


def _words(name: str) -> set[str]:
    """The words of a file's name but for those that say how it is stored."""
    words = re.split(r"[^a-z0-9.]+", Path(name.lower()).stem)
    return {
        word for word in words if word and not re.fullmatch(r"mmproj|model|f16|f32|bf16|q\d.*|iq\d.*", word)
    }
