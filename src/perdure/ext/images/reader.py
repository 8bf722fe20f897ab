"""Image reader: what images in messages become for the model of a runtime.

A file that was encoded before, by an encoder of this identity, is not encoded again: not in another message,
turn, session or process, and who sends it waits for no other file. The encoder is started for one that was
not. A file at which it died is not tried again.
"""

from __future__ import annotations

import threading

from perdure import EngineDiedError, InvalidInputError, SessionError
from perdure.ext.images.encoder import Encoder
from perdure.ext.images.media import EncodedFile
from perdure.ext.images.media_store import FileDigest, MediaStore, open_store
from perdure.ext.images.projector import find_projector
from perdure.spi.chat import Image
from perdure.spi.runtime import Backend

_REMEMBERED = 1024


class StoredImages:
    """Images of one runtime, whose rows are in its store. Safe from any thread."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._encoding = threading.Lock()
        """One file is encoded at a time."""
        self._deadly: dict[FileDigest, None] = {}
        """Files at which the encoder died, the latest last."""
        self._store: MediaStore | None = None
        self._encoder: Encoder | None = None

    def tokens(self, image: Image, namespace: str) -> list[int]:
        with self._lock:
            store, encoder = self._opened()
        digest = FileDigest(bytes.fromhex(image.digest))
        known = store.find(namespace, encoder.identity, digest)
        if known is None:
            with self._encoding:
                # Who has asked for the same file meanwhile finds its rows.
                known = store.find(namespace, encoder.identity, digest)
                if known is None:
                    encoded = self._encode(encoder, digest, self._file(store, image, digest, namespace))
                    known = store.keep(namespace, encoder.identity, digest, encoded)
        return known.tokens

    def keep(self, image: Image, namespace: str) -> None:
        """Have its file, for a session that names it."""
        with self._lock:
            store, _ = self._opened()
        if image.data is not None:
            store.keep_file(image.data, namespace)

    def count(self, data: bytes) -> int:
        """How many tokens a file will be, by its header alone."""
        with self._lock:
            _, encoder = self._opened()
        return encoder.count(data)

    def file(self, digest: FileDigest, namespace: str) -> bytes | None:
        """The bytes of a file that this namespace sent; None where it is gone."""
        with self._lock:
            store, _ = self._opened()
        return store.file(digest, namespace)

    def _file(self, store: MediaStore, image: Image, digest: FileDigest, namespace: str) -> bytes:
        data = image.data if image.data is not None else store.file(digest, namespace)
        if data is None:
            raise SessionError(
                f"the file of the image {image.digest[:12]}… is not in the store any more, and what was "
                "encoded of it neither: send it again, or go back to before it"
            )
        return data

    def _encode(self, encoder: Encoder, digest: FileDigest, data: bytes) -> EncodedFile:
        if digest in self._deadly:
            raise InvalidInputError(
                "the encoder died at this image before, so it is not tried again: save it anew as PNG, and "
                "send that"
            )
        try:
            encoded = encoder.encode(data)
        except EngineDiedError:
            self._deadly[digest] = None
            if len(self._deadly) > _REMEMBERED:
                del self._deadly[next(iter(self._deadly))]
            raise
        if any(medium.n_pos != len(medium) for medium in encoded.media):
            raise InvalidInputError(
                "images of this model have positions in two dimensions (M-RoPE), which cannot be read yet"
            )
        return encoded

    @property
    def encoded(self) -> int:
        """Files that were encoded here."""
        return self._encoder.encoded if self._encoder is not None else 0

    def close(self) -> None:
        with self._lock:
            if self._encoder is not None:
                self._encoder.close()

    def _opened(self) -> tuple[MediaStore, Encoder]:
        storage, model = self._backend.storage, self._backend.model.path
        if self._store is None:
            assert storage.folder is not None
            self._store = open_store(storage.folder, storage.encryption)
        if self._encoder is None:
            projector = find_projector(model) if model is not None and model.is_file() else None
            if model is None or projector is None:
                raise InvalidInputError(
                    "this model reads no images: there is no projector (a GGUF file with mmproj in its name) "
                    "beside its file"
                )
            self._encoder = Encoder(model, projector.path)
        return self._store, self._encoder
