"""The process that reads a PDF: `python -m perdure.ext.documents.child FILE MEMORY`.

{"text": "…", "pages": 3}    or    {"error": "…"}    or    {"error": "…", "limit": 2000}
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from perdure.ext.documents.pdf import MOST_CHARACTERS, MOST_PAGES, SECONDS
from perdure.spi.base import processes


def main(path: Path, memory: int) -> None:
    processes.leave_no_core()
    # What is odd about a file is no concern of the log.
    logging.disable()
    processes.limit_process(more_seconds=SECONDS, nbytes=memory)
    json.dump(read(path), sys.stdout)


def read(path: Path) -> dict[str, Any]:
    from pypdf import PdfReader

    try:
        reader = PdfReader(path, strict=False)
        if reader.is_encrypted and not reader.decrypt(""):
            return {"error": "this PDF needs a password; save it without one"}
        count = len(reader.pages)
        if count > MOST_PAGES:
            return {
                "error": f"the PDF has {count} pages, and {MOST_PAGES} are read of one",
                "limit": MOST_PAGES,
            }
        pages: list[str] = []
        left = MOST_CHARACTERS
        for page in reader.pages:
            pages.append(_plain(page.extract_text() or ""))
            left -= len(pages[-1])
            if left < 0:
                return {
                    "error": f"the PDF has more than {MOST_CHARACTERS} characters of text; split it",
                    "limit": MOST_CHARACTERS,
                }
    except MemoryError:
        return {"error": "this PDF takes too much memory to read; attach its text"}
    except Exception as error:
        # Whatever a damaged file makes of its reader.
        return {"error": f"this PDF cannot be read: {error}"}
    if not any(pages):
        return {"error": "this PDF has no text: its pages are pictures; attach them as images"}
    if count == 1:
        return {"text": pages[0], "pages": 1}
    return {
        "text": "\n\n".join(f"Page {number}\n{text}" for number, text in enumerate(pages, 1) if text),
        "pages": count,
    }


def _plain(text: str) -> str:
    """Without what no tokenizer and no database takes: surrogates, NUL."""
    return text.encode("utf-8", "ignore").decode().replace("\0", "").strip()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
