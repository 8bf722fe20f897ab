"""Extensions: features that can be left out, one value each, found through entry points.

    [project.entry-points."perdure.extensions"]
    mlx = "perdure.ext.mlx:EXTENSION"

A value names what an extension brings by where it can be imported from ("module:attribute"), and its module
imports nothing heavy: reading all values loads no feature. An extension imports public names of `perdure`
and modules of `perdure.spi`, and other extensions only where its value says so (`needs`). One that cannot be
imported is left out with a warning, and so is a part of one; what it would have brought does not exist then.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from perdure.errors import InvalidInputError

log = logging.getLogger("perdure.extension")

GROUP = "perdure.extensions"
"""The entry points of packages that bring extensions."""
_OURS = "perdure.ext."


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtensionCommand:
    """A command of an extension: `perdure NAME …`."""

    name: str
    target: str
    """A function that typer reads as a command, or a `typer.Typer` with commands below it."""
    section: str = "Extensions"
    """Where `perdure --help` lists it."""
    below: str = ""
    """The group of commands that it belongs to, as in `perdure sessions verify`; empty: none."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further keywords of `typer.Typer.command`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """All that one feature brings. Every reference is "module:attribute", imported when it is needed."""

    name: str
    needs: tuple[str, ...] = ()
    """Names of other extensions that it imports from."""
    engines: tuple[str, ...] = ()
    """Values of `Engine`: asked before llama.cpp whether they open a model."""
    options: tuple[str, ...] = ()
    """Dataclasses whose fields are options of `perdure.open`, `Model` or `Model.context`."""
    cores: Mapping[str, str] = field(default_factory=dict)
    """By an option of `Model.context`: values of `CoreMaker`, which open its contexts on llama.cpp."""
    drafters: tuple[str, ...] = ()
    """Values of `DrafterOpener`, which open the drafters that guess the next tokens of replies."""
    commands: tuple[ExtensionCommand, ...] = ()
    protocols: tuple[str, ...] = ()
    """Values of the server's `Protocol`."""
    routes: tuple[str, ...] = ()
    """Values of FastAPI's `APIRouter`."""
    uploads: tuple[str, ...] = ()
    """Paths of its routes whose body is a file, which `receive_file` reads."""
    forms: tuple[str, ...] = ()
    """The same, where the file comes in a form."""
    tasks: tuple[str, ...] = ()
    """Coroutine functions of a `ServerState`, which run in the event loop of a server until it stops."""
    page_routes: tuple[str, ...] = ()
    """The same, for documents of the page: not there under `serve --no-page`."""
    prompt_rules: tuple[str, ...] = ()
    """Classes of `PromptRule`: one object for each chat format."""
    families: Mapping[str, str] = field(default_factory=dict)
    """By the name of a model family in the kernel's table: values of `Family`."""
    conversations: tuple[str, ...] = ()
    """Values of `NamedConversations`: asked in turn for the session of a request."""
    services: tuple[str, ...] = ()
    """Values of `ServerService`: what runs beside a server."""
    checks: tuple[str, ...] = ()
    """Functions of a store's folder and of URLs of blocks that give `Finding`s to `perdure doctor`."""
    stores: Mapping[str, str] = field(default_factory=dict)
    """By the scheme of a URL in `store`: values of `RemoteStore`."""
    tiers: Mapping[str, str] = field(default_factory=dict)
    """By the scheme of a URL in `blocks`: values of `TierOpener`."""
    encryption: str | None = None
    """A function that finds the key of state on the disk: an `EncryptionChoice`."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """What calls of the kernel hand to an extension, by their names."""


@dataclass(frozen=True, slots=True)
class _Installed:
    extensions: Mapping[str, Extension]
    left_out: tuple[tuple[str, str], ...]


def extensions() -> Mapping[str, Extension]:
    """All installed extensions by their names: ours first, each in the order of these names."""
    return _installed().extensions


def left_out() -> tuple[tuple[str, str], ...]:
    """The extensions that are installed and cannot be used, each with the reason."""
    return _installed().left_out


@functools.cache
def _installed() -> _Installed:
    # To read what is installed takes 20 ms: only where an extension may be meant.
    from importlib.metadata import entry_points

    usable: dict[str, Extension] = {}
    refused: list[tuple[str, str]] = []
    # A name that two bring (of an extension, a command, a scheme) is the first one's: ours are not replaced.
    for entry in sorted(
        entry_points(group=GROUP), key=lambda each: (not each.value.startswith(_OURS), each.name)
    ):
        try:
            value = entry.load()
        except Exception as error:
            refused.append((entry.name, f"{entry.value} cannot be imported: {error}"))
            continue
        if not isinstance(value, Extension):
            refused.append((entry.name, f"{entry.value} is no Extension, it is a {type(value).__name__}"))
        elif value.name in usable:
            refused.append((entry.name, f"{entry.value} is named {value.name}, and so is another"))
        else:
            usable[value.name] = value
    # Again, as what one needs may be left out for what that needs.
    while missing := {
        name: needs for name, each in usable.items() if (needs := set(each.needs) - usable.keys())
    }:
        for name, needs in missing.items():
            del usable[name]
            refused.append((name, f"it needs {', '.join(sorted(needs))}"))
    for name, reason in refused:
        log.warning("extension %s is left out: %s", name, reason)
    return _Installed(usable, tuple(refused))


def references(kind: str) -> Iterator[str]:
    """Where what all extensions bring of a kind is imported from. What cannot be imported is left out."""
    for extension in extensions().values():
        yield from (each for each in getattr(extension, kind) if _is_there(extension.name, each))


def brought(kind: str) -> Iterator[Any]:
    """What all extensions bring of a kind, such as "routes", imported."""
    return map(imported, references(kind))


def part(name: str, extension: str) -> Any:
    """What answers a call of the kernel. Without it, an error names the `extension` of ours that has it."""
    reference = by_name("parts").get(name)
    if reference is None:
        raise InvalidInputError(f"{name} needs perdure's extension {extension!r}, which is not installed")
    return imported(reference)


def optional_part(name: str) -> Any | None:
    """The same, or None where no extension brings it."""
    reference = by_name("parts").get(name)
    return None if reference is None else imported(reference)


def by_name(kind: str) -> Mapping[str, str]:
    """Where what stands behind a name is imported from: the scheme of a URL for "stores" and "tiers", an
    option for "cores", a call of the kernel for "parts", a name for "families"."""
    openers: dict[str, str] = {}
    for extension in extensions().values():
        openers = {**getattr(extension, kind), **openers}
    return openers


@functools.cache
def _is_there(extension: str, reference: str) -> bool:
    try:
        imported(reference)
    except Exception as error:
        log.warning("extension %s goes without a part: %s", extension, error)
        return False
    return True


def imported(reference: str, what: str = "part of an extension") -> Any:
    """What is at "module:attribute"."""
    module, _, attribute = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InvalidInputError(f"{reference} names no {what}: {error}") from None
