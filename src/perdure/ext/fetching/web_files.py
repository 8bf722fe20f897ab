"""Models from an address on the web: where they lie on this machine, and how they come."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote, urlsplit

from perdure.spi.models import Progress, UrlSource, part_names


def url_folder(models: Path) -> Path:
    """Where all files from addresses are kept."""
    return models / "web"


def url_place(source: UrlSource, models: Path) -> Path | None:
    """The first file of the model, if all of it is here already."""
    first = url_folder(models) / source.place
    parts = [first.with_name(part) for part in part_names(first.name)]
    return parts[0] if all(part.is_file() for part in parts) else None


def fetch_url(source: UrlSource, models: Path, progress: Progress | None = None) -> Path:
    """Have the model of `source`, all of its parts, in the folder `models`.

    Nobody says what its bytes should be, so what is here already is not compared with the address again.
    """
    from perdure.ext.fetching.download import Remote, download, fetch_lock, forget, publish, web

    first = url_folder(models) / source.place
    names = part_names(first.name)
    with fetch_lock(models, f"web--{source.place.replace('/', '--')}"), web() as client:
        for name in names:
            if (target := first.with_name(name)).is_file():
                continue
            part = models / ".parts" / "web" / f"{Path(source.place).with_name(name)}.part"
            download(client, Remote(url=_sibling(source.url, name)), part, progress)
            publish(part, target)
            forget(part)
    return first.with_name(names[0])


def _sibling(url: str, name: str) -> str:
    """The address of another part of the same model."""
    parts = urlsplit(url)
    folder, _, _ = parts.path.rpartition("/")
    return parts._replace(path=f"{folder}/{quote(name)}").geturl()
