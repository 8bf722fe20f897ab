"""Images that a person shows a model in the command."""

from __future__ import annotations

from pathlib import Path

from perdure.chat.message import Image
from perdure.extension import optional_part


def image_of(path: Path) -> Image:
    """The image in a file. What encodes images is fetched for the first, if the person agrees."""
    from perdure.cli.output import progress, terminal

    image = Image(path)
    provide = optional_part("what encodes images")
    if provide is not None:
        provide(terminal.agrees, progress.fetching)
    return image
