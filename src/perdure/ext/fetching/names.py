"""Names of models: those of the catalogue, of a hub, of an address, of other programs, or paths."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from perdure import ModelNotFoundError
from perdure.spi.base import settings
from perdure.spi.models import (
    ALIASES,
    MODELS,
    FileSource,
    HubSource,
    Source,
    UrlSource,
    stays_inside,
)

_WORD = r"[A-Za-z0-9][\w.-]*"
_REPO = re.compile(rf"(?P<repo>{_WORD}/{_WORD})(?:@(?P<revision>[\w.-]+))?")
_SUFFIX = ".gguf"
_HUB_HOSTS = ("hf.co/", "huggingface.co/", "www.huggingface.co/")
_HUB_PATH = re.compile(r"(?P<repo>[^/]+/[^/]+)/(?:resolve|blob|raw)/(?P<revision>[^/]+)/(?P<file>.+)")
_TAGGED = re.compile(r"[A-Za-z][\w.-]*:[\w.-]+")


def find(name: str, *, own: bool) -> Source:
    """Where the model of a name comes from that is neither of the registry nor an absolute path."""
    from perdure.ext.fetching import catalogue
    from perdure.ext.fetching.other_programs import LM_STUDIO, OLLAMA, find_ollama

    listed = catalogue.find(name)
    if listed is not None:
        hub = HubSource(repo=listed.repo, file=listed.file)
        fetched = (settings().models / "hub" / listed.repo / listed.file).is_file()
        theirs = None if own or fetched else find_ollama(name)
        return FileSource(path=theirs) if theirs is not None else hub
    if name.lower().startswith((OLLAMA, LM_STUDIO)):
        return _other_program(name)
    if name.startswith("hf:"):
        return _hub(name, name.removeprefix("hf:"))
    if name.lower().startswith(("https://", "http://")):
        return _url(name)
    for host in _HUB_HOSTS:
        if name.lower().startswith(host):
            return _hub_page(name, name[len(host) :])
    path = Path(name).expanduser()
    if path.is_file():
        return FileSource(path=path)
    if _REPO.match(name) and (":" in name or (name.count("/") == 1 and not name.endswith(_SUFFIX))):
        return _hub(name, name)
    if name.endswith(_SUFFIX) or path.is_absolute() or name.startswith((".", "~")):
        return FileSource(path=path)
    if not own and (theirs := find_ollama(name)) is not None:
        return FileSource(path=theirs)
    near = catalogue.near(name)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    raise ModelNotFoundError(
        f"there is no model {name!r}: {meant}`perdure models` lists the known names; other models are a path "
        "to a .gguf file, its URL, or a name on the Hugging Face hub: owner/repo or owner/repo:Q4_K_M"
    )


def _other_program(name: str) -> FileSource:
    """A model of another program on this machine."""
    from perdure.ext.fetching.other_programs import OLLAMA, find_lm_studio, find_ollama

    ollama = name.lower().startswith(OLLAMA)
    path = find_ollama(name) if ollama else find_lm_studio(name)
    if path is None:
        program = "Ollama" if ollama else "LM Studio"
        raise ModelNotFoundError(
            f"{program} has no model {name.partition(':')[2]!r} here; `perdure ls` lists its models"
        )
    return FileSource(path=path)


def names_model(word: str) -> bool:
    """Whether a word can only be meant as a model: a known name, a file that is there, or an address.

    `llama3.2:1b` is one too, as Ollama writes them, though nothing is known by it here.
    """
    from perdure.ext.fetching.other_programs import LM_STUDIO, OLLAMA

    if not word or any(character.isspace() for character in word):
        return False
    lower = word.lower()
    return (
        lower in MODELS
        or lower in ALIASES
        or lower.endswith(_SUFFIX)
        or lower.startswith(("hf:", "https://", "http://", OLLAMA, LM_STUDIO, *_HUB_HOSTS))
        or _REPO.fullmatch(word.split(":")[0]) is not None
        or _TAGGED.fullmatch(word) is not None
    )


def _url(name: str) -> HubSource | UrlSource:
    parts = urlsplit(name)
    for host in _HUB_HOSTS:
        if f"{(parts.hostname or '')}/" == host:
            return _hub_page(name, unquote(parts.path).strip("/"))
    path = unquote(parts.path).lstrip("/")
    if not parts.hostname or not path.lower().endswith(_SUFFIX) or not stays_inside(path):
        raise ModelNotFoundError(f"{name} is not the address of a .gguf file")
    return UrlSource(url=name)


def _hub_page(name: str, path: str) -> HubSource:
    """What a page or a file of the hub's site shows."""
    file = _HUB_PATH.fullmatch(path)
    if file is None:
        return _hub(name, path.removesuffix("/tree/main"))
    revision = "" if file["revision"] == "main" else f"@{file['revision']}"
    return _hub(name, f"{file['repo']}{revision}/{file['file']}")


def _hub(name: str, reference: str) -> HubSource:
    match = _REPO.match(reference)
    rest = reference[match.end() :] if match else ""
    if match is None or (rest and rest[0] not in "/:") or rest in ("/", ":"):
        raise ModelNotFoundError(
            f"{name!r} is not a name on a hub; write hf:owner/repo/file.gguf, owner/repo:file.gguf, "
            "owner/repo:Q4_K_M or owner/repo"
        )
    picked = rest[1:]
    if picked and not stays_inside(picked):
        raise ModelNotFoundError(f"{name!r} does not name a file inside of {match['repo']}")
    repo, revision = match["repo"], match["revision"]
    if not picked:
        return HubSource(repo=repo, revision=revision)
    if picked.endswith(_SUFFIX):
        return HubSource(repo=repo, file=picked, revision=revision)
    if rest[0] == "/":
        raise ModelNotFoundError(f"{name!r} does not name a .gguf file")
    return HubSource(repo=repo, tag=picked, revision=revision)
