"""Places for blocks of several machines: a directory, a bucket, a Redis server.

    file:///mnt/shared/perdure?size=100        a directory that all machines mount (NFS and the like)
    s3://bucket/prefix?size=500&endpoint=…     S3, or what speaks its protocol
    redis://host:6379/0?size=2&tokens=2048     Redis, for short beginnings that many conversations share

`size` is in GiB, `tokens` the last position that is kept there. A place keeps objects by name, each whole or
not at all, and says nothing of what is in them. It may fail and may be slow: `SharedTier` sees to that.
Others may write there too: a place asks how large an object is before it reads it.

What a network file system promises: a file that was renamed into its place is seen whole, by others after a
few seconds at the latest (attribute caching). No lock is used, and none is needed: an object's name stands
for its content, so two machines that write one write the same. An fsync before the rename is what makes a
file whole after a crash of the file server.
"""

from __future__ import annotations

import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from perdure import InvalidInputError, StoreError
from perdure.spi.base import check_size, is_whole, make_folder, read_file, read_stream, system

_SECONDS = 5
"""For a connection, and for an answer."""


class Place(ABC):
    """Objects by name. Any thread may call; every call may wait, and may raise whatever it likes."""

    name: str
    """What reuse from it is reported under."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Keep an object: when this returns it is there, whole, for all machines."""

    @abstractmethod
    def get(self, name: str, limit: int) -> bytes | None:
        """An object, None where there is none; `TooLargeError`, and nothing read, where it has more than
        `limit` bytes."""

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None: ...

    @abstractmethod
    def names(self, prefix: str) -> Iterator[str]:
        """Those that begin with `prefix`."""

    def close(self) -> None:  # noqa: B027
        """Give connections back."""


class DirectoryPlace(Place):
    """A directory, with files spread over 256 folders and lists in one of their own."""

    name = "shared"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_folder(folder / "lists")

    def put(self, name: str, data: bytes) -> None:
        path = self._path(name)
        make_folder(path.parent)
        temporary = path.with_name(f".{name[:32]}.{secrets.token_hex(8)}.tmp")
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                system.sync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise

    def get(self, name: str, limit: int) -> bytes | None:
        try:
            return read_file(self._path(name), limit, links=False)
        except FileNotFoundError:
            return None

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._path(name).unlink(missing_ok=True)

    def names(self, prefix: str) -> Iterator[str]:
        with os.scandir(self.folder / "lists") as entries:
            yield from [each.name for each in entries if each.name.startswith(prefix)]

    def _path(self, name: str) -> Path:
        return self.folder / ("lists" if "-" in name else name[:2]) / name


class S3Place(Place):
    """A bucket. Keys and regions are those of boto3: the environment, files, the machine's role."""

    name = "s3"

    def __init__(self, bucket: str, prefix: str, *, endpoint: str | None) -> None:
        import boto3
        from botocore.config import Config

        self._bucket, self._prefix = bucket, f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._client: Any = boto3.client(
            "s3",
            endpoint_url=endpoint,
            config=Config(connect_timeout=_SECONDS, read_timeout=_SECONDS, retries={"max_attempts": 1}),
        )

    def put(self, name: str, data: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=self._prefix + name, Body=data)

    def get(self, name: str, limit: int) -> bytes | None:
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)
        except self._client.exceptions.NoSuchKey:
            return None
        with closing(answer["Body"]) as body:
            return read_stream(body, limit, name, size=answer.get("ContentLength", 0))

    def delete(self, names: Sequence[str]) -> None:
        for at in range(0, len(names), 1000):
            objects = [{"Key": self._prefix + name} for name in names[at : at + 1000]]
            self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True})

    def names(self, prefix: str) -> Iterator[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix + prefix
        )
        for page in pages:
            yield from (each["Key"][len(self._prefix) :] for each in page.get("Contents", ()))

    def close(self) -> None:
        self._client.close()


class RedisPlace(Place):
    """A Redis server, within `size` bytes over all machines: the objects written longest ago go first."""

    name = "redis"
    _BYTES, _WRITTEN, _SIZES = _KEYS = ("perdure:bytes", "perdure:written", "perdure:sizes")

    def __init__(self, url: str, *, size: int) -> None:
        import redis

        self._redis: Any = redis.Redis.from_url(
            url, socket_timeout=_SECONDS, socket_connect_timeout=_SECONDS, health_check_interval=10
        )
        self._size = size
        # One step for all machines: room is made before the bytes are written.
        self._put: Any = self._redis.register_script(
            """
            local old = tonumber(redis.call('HGET', KEYS[3], ARGV[1]) or '0')
            local total = tonumber(redis.call('GET', KEYS[1]) or '0') - old
            local size, bound = #ARGV[2], tonumber(ARGV[4])
            if size > bound then return 0 end
            while total + size > bound do
                local first = redis.call('ZRANGE', KEYS[2], 0, 0)[1]
                if not first then break end
                total = total - tonumber(redis.call('HGET', KEYS[3], first) or '0')
                redis.call('DEL', 'perdure:o:' .. first)
                redis.call('ZREM', KEYS[2], first)
                redis.call('HDEL', KEYS[3], first)
            end
            redis.call('SET', 'perdure:o:' .. ARGV[1], ARGV[2])
            redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
            redis.call('HSET', KEYS[3], ARGV[1], size)
            redis.call('SET', KEYS[1], total + size)
            return 1
            """
        )
        # Two machines may make room at the same moment, by the same object: it is counted once.
        self._delete: Any = self._redis.register_script(
            """
            for _, name in ipairs(ARGV) do
                local size = redis.call('HGET', KEYS[3], name)
                if size then
                    redis.call('DEL', 'perdure:o:' .. name)
                    redis.call('ZREM', KEYS[2], name)
                    redis.call('HDEL', KEYS[3], name)
                    redis.call('DECRBY', KEYS[1], size)
                end
            end
            """
        )

    def put(self, name: str, data: bytes) -> None:
        if not self._put(keys=self._KEYS, args=[name, data, time.time(), self._size]):
            raise StoreError(f"an object of {len(data)} bytes does not fit into {self._size}")

    def get(self, name: str, limit: int) -> bytes | None:
        key = f"perdure:o:{name}"
        if not (size := int(self._redis.strlen(key))):
            return None
        check_size(size, limit, name)
        # No more, where it has grown meanwhile: what was cut does not prove itself.
        return bytes(self._redis.getrange(key, 0, size - 1))

    def delete(self, names: Sequence[str]) -> None:
        for at in range(0, len(names), 1000):
            self._delete(keys=self._KEYS, args=list(names[at : at + 1000]))

    def names(self, prefix: str) -> Iterator[str]:
        for name, _ in self._redis.zscan_iter(self._WRITTEN, match=f"{prefix}*", count=1000):
            yield name.decode()

    @property
    def nbytes(self) -> int:
        return int(self._redis.get(self._BYTES) or 0)

    def close(self) -> None:
        self._redis.close()


def parse_place(url: str) -> tuple[Callable[[], Place], int, int | None]:
    """What opens a place, its bytes, and the last position that is kept there."""
    try:
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise InvalidInputError(f"this is no URL of a place for blocks: {error}") from None
    usual = {"file": "100", "s3": "500", "redis": "2", "rediss": "2"}
    if parts.scheme not in usual:
        raise InvalidInputError(f"a place for blocks begins with file://, s3:// or redis://, got {url!r}")
    size = round(_positive("size", query.pop("size", usual[parts.scheme])) * (1 << 30))
    last = query.pop("tokens", "2048" if parts.scheme.startswith("redis") else "")
    if last and not (last.isdecimal() and is_whole(int(last)) and int(last)):
        raise InvalidInputError(f"tokens is a whole number from 1, got {last!r}")
    endpoint = query.pop("endpoint", None) if parts.scheme == "s3" else None
    if query and not parts.scheme.startswith("redis"):
        raise InvalidInputError(f"{', '.join(query)} is not known in the URL of a place for blocks")
    if parts.scheme == "file":
        folder = Path(unquote(parts.path))
        if parts.netloc or not folder.is_absolute() or len(folder.parts) < 2:
            raise InvalidInputError(f"a directory is file:///and/its/path, got {url!r}")
        return lambda: DirectoryPlace(folder), size, int(last) if last else None
    if parts.scheme == "s3":
        if not parts.netloc:
            raise InvalidInputError(f"a bucket is s3://BUCKET/PREFIX, got {url!r}")
        return (
            lambda: S3Place(parts.netloc, parts.path, endpoint=endpoint),
            size,
            int(last) if last else None,
        )
    plain = urlunsplit((parts.scheme, parts.netloc, parts.path, urlencode(query), ""))
    return lambda: RedisPlace(plain, size=size), size, int(last) if last else None


def open_place(url: str) -> tuple[Place, int, int | None]:
    """A place, its bytes, and the last position that is kept there."""
    make, size, tokens = parse_place(url)
    try:
        return make(), size, tokens
    except ModuleNotFoundError as error:
        raise StoreError(
            f"{url.split(':')[0]}:// needs {error.name}: pip install 'perdure[cluster]'"
        ) from None
    except InvalidInputError:
        raise
    except Exception as error:
        raise StoreError(f"the blocks in {url.split('?')[0]} cannot be reached: {error}") from error


def _positive(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise InvalidInputError(f"{name} is a number of GiB above 0, got {text!r}")
    return value
