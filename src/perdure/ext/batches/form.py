"""A file that comes in a form, as OpenAI's clients send it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

from fastapi import Request
from starlette.datastructures import FormData, UploadFile

from perdure import InvalidInputError
from perdure.ext.batches.files import MOST_BYTES
from perdure.spi.server import AppState, invalid, receive_file

_FIELDS, _FIELD_BYTES = 16, 4096
_OVERHEAD = 64 << 10
"""Bytes of a form besides its file."""
_PIECE = 64 << 10


async def read_form(request: Request, path: Path, app_state: AppState) -> FormData:
    """The form of a request, received at `path` first. Its files are closed by its `close`."""
    try:
        import python_multipart  # noqa: F401
        from starlette.formparsers import MultiPartException, MultiPartParser
    except ImportError:
        raise InvalidInputError("forms need one more package: pip install 'perdure[batches]'") from None
    await receive_file(request, path, app_state, most=MOST_BYTES + _OVERHEAD)

    async def pieces() -> AsyncGenerator[bytes, None]:
        with path.open("rb") as file:
            while piece := await app_state.call(file.read, _PIECE):
                yield piece
        yield b""

    parser = MultiPartParser(
        request.headers, pieces(), max_files=1, max_fields=_FIELDS, max_part_size=_FIELD_BYTES
    )
    try:
        return await parser.parse()
    except MultiPartException as error:
        raise invalid("body", f"it is no form: {error.message}", code="invalid_form") from None
    except (KeyError, ValueError, UnicodeError) as error:
        raise invalid("body", f"it is no form: {error}", code="invalid_form") from None


def file_of(form: FormData) -> UploadFile:
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise invalid("file", "the form has no file of that name", code="missing_required_parameter")
    return file


def text_of(form: FormData, name: str) -> str | None:
    value = form.get(name)
    return value if isinstance(value, str) else None
