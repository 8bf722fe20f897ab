"""A projector that kills its encoder is not loaded again, and one that only met a bad file is."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from homes import new_home
from perdure import DeadlyFileError, EngineDiedError
from perdure.ext.images.encoder import Encoder, _Child
from perdure.ext.workers import deadly_files

from .pictures import picture

Toy = Callable[[str], tuple[Path, Path]]


@pytest.fixture
def files(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A model, and a projector whose width the library aborts over as it encodes."""
    monkeypatch.setenv("PERDURE_HOME", str(new_home(tmp_path / "home")))
    model, projector = toy("llava")
    data = bytearray(projector.read_bytes())
    key = b"clip.vision.embedding_length"
    at = data.index(key) + len(key) + 4
    data[at : at + 4] = (1).to_bytes(4, "little")
    damaged = tmp_path / "mmproj.gguf"
    damaged.write_bytes(data)
    return model, damaged


def test_a_projector_that_kills_its_encoder_is_refused_from_then_on(
    files: tuple[Path, Path], toy: Toy, tmp_path: Path
) -> None:
    """Class 8: also a copy of it, and in another process; a file that was changed is tried."""
    model, projector = files
    with Encoder(model, projector, threads=1) as encoder:
        with pytest.raises(DeadlyFileError, match=r"mmproj.gguf .* SIGABRT .*perdure engine retry mmproj"):
            encoder.encode(picture())
        assert encoder.pid is None
    copy = shutil.copy(projector, tmp_path / "copy.gguf")
    with Encoder(model, Path(copy), threads=1) as encoder:
        with pytest.raises(DeadlyFileError):
            encoder.encode(picture(seed=3))
        assert encoder.pid is None
        assert deadly_files.forget("mmproj.gguf")
    shutil.copy(toy("llava")[1], projector)
    with Encoder(model, projector, threads=1) as encoder:
        assert encoder.encode(picture()).media


def test_an_encoder_that_is_ended_by_a_signal_marks_no_projector(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it has encoded anything: the next process shows that the projector encodes."""
    monkeypatch.setenv("PERDURE_HOME", str(new_home(tmp_path / "home")))
    with Encoder(*toy("llava"), threads=1) as encoder:
        encode = _Child.answer

        def killed(child: _Child, patience: float, what: str) -> Any:
            monkeypatch.setattr(_Child, "answer", encode)
            os.kill(child.pid, signal.SIGSEGV)
            return encode(child, patience, what)

        monkeypatch.setattr(_Child, "answer", killed)
        # Or it had answered already.
        with suppress(EngineDiedError):
            encoder.encode(picture())
        assert not deadly_files.remembered()
        assert encoder.encode(picture()).media
