"""Image reader: what images in messages become for the model of a runtime.

A file that was encoded before, by an encoder of this identity, is not encoded again: not in another message,
turn, session or process, and who sends it waits for no other file. The encoder is started for one that was
not. A file at which it died is not tried again.
"""

from __future__ import annotations

import threading
import time

from perdure import EngineDiedError, InvalidInputError, SessionError
from perdure.ext.images.encoder import Encoder
from perdure.ext.images.encoding_turns import EncodingTurns
from perdure.ext.images.media import EncodedFile, MediumKind
from perdure.ext.images.media_store import FileDigest, MediaStore, open_store
from perdure.ext.images.projector import find_projector
from perdure.spi.chat import Image, ImageFiles, is_sound
from perdure.spi.libraries import choose
from perdure.spi.runtime import Backend, ImageEncoded

_REMEMBERED = 1024


class StoredImages:
    """Images of one runtime, whose rows are in its store. Safe from any thread."""

    def __init__(self, backend: Backend, files: ImageFiles | None) -> None:
        """`files` has those that sessions name."""
        self._backend = backend
        self._files = files
        self._lock = threading.Lock()
        self._turns = EncodingTurns()
        self._deadly: dict[tuple[str, str], None] = {}
        """Images at which the encoder died, by the namespace that sent them, the latest last."""
        self._store: MediaStore | None = None
        self._encoder: Encoder | None = None

    def tokens(self, image: Image, namespace: str) -> list[int]:
        store, encoder = self._opened()
        digest, identity = FileDigest(bytes.fromhex(image.digest)), encoder.identity_for(image)
        known = store.find(namespace, identity, digest)
        if known is None:
            with self._turns.take(namespace):
                # Who has asked for the same file meanwhile finds its rows.
                known = store.find(namespace, identity, digest)
                if known is None:
                    encoded = self._encode(encoder, namespace, image, self._file(image, digest, namespace))
                    known = store.keep(namespace, identity, digest, encoded)
        return known.tokens

    def keep(self, image: Image, namespace: str) -> None:
        """Have its file, for a session that names it."""
        if image.data is not None and self._files is not None and self.file(image.digest, namespace) is None:
            store = self._stored()
            packed = store.pack_file(FileDigest(bytes.fromhex(image.digest)), image.data)
            self._files.keep_file(namespace, image.digest, packed)

    def file(self, digest: str, namespace: str) -> bytes | None:
        """The file of an image that sessions name, as it was sent."""
        packed = self._files.file(namespace, digest) if self._files is not None else None
        return packed and self._stored().unpack_file(FileDigest(bytes.fromhex(digest)), packed)

    def count(self, image: Image, namespace: str) -> int:
        """How many tokens an image takes in a prompt. One that was not encoded is judged by its header."""
        store, encoder = self._opened()
        digest = FileDigest(bytes.fromhex(image.digest))
        known = store.find(namespace, encoder.identity_for(image), digest)
        if known is not None:
            return len(known.tokens)
        data = self._file(image, digest, namespace)
        return encoder.count(data, kind_of(data), low=image.low)

    def _file(self, image: Image, digest: FileDigest, namespace: str) -> bytes:
        data = image.data if image.data is not None else self.file(image.digest, namespace)
        if data is None:
            raise SessionError(
                f"the file of the image {image.digest[:12]}… is not in the store any more, and what was "
                "encoded of it neither: send it again, or go back to before it"
            )
        return data

    def _encode(self, encoder: Encoder, namespace: str, image: Image, data: bytes) -> EncodedFile:
        if (namespace, image.name) in self._deadly:
            raise InvalidInputError(
                "the encoder died at this image before, so it is not tried again: save it anew as PNG, and "
                "send that"
            )
        began = time.monotonic()
        try:
            encoded = encoder.encode(data, kind_of(data), low=image.low)
        except EngineDiedError:
            self._deadly[namespace, image.name] = None
            if len(self._deadly) > _REMEMBERED:
                del self._deadly[next(iter(self._deadly))]
            raise
        seconds = time.monotonic() - began
        self._backend.events.emit(ImageEncoded, "", len(encoded.tokens), len(data), namespace, seconds)
        return encoded

    @property
    def encoded(self) -> int:
        """Files that were encoded here."""
        return self._encoder.encoded if self._encoder is not None else 0

    def close(self) -> None:
        with self._lock:
            if self._encoder is not None:
                self._encoder.close()

    def _stored(self) -> MediaStore:
        with self._lock:
            return self._opened_store()

    def _opened(self) -> tuple[MediaStore, Encoder]:
        with self._lock:
            return self._opened_store(), self._opened_encoder()

    def _opened_store(self) -> MediaStore:
        storage = self._backend.storage
        if self._store is None:
            assert storage.folder is not None
            self._store = open_store(storage.folder, storage.encryption)
        return self._store

    def _opened_encoder(self) -> Encoder:
        model = self._backend.model.path
        if self._encoder is None:
            projector = find_projector(model) if model is not None and model.is_file() else None
            if model is None or projector is None:
                raise InvalidInputError(
                    "this model reads no images: there is no projector (a GGUF file with mmproj in its name) "
                    "beside its file"
                )
            engine = choose()
            self._encoder = Encoder(
                model, projector.path, engine=engine.source.folder, gpus=engine.result.devices
            )
        return self._encoder


def kind_of(data: bytes) -> MediumKind:
    return "audio" if is_sound(data) else "image"
