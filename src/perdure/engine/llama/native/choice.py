"""Which library is used: the first that runs here, and what is said of those that do not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perdure.config import settings
from perdure.engine.llama.native import guard
from perdure.engine.llama.native.probe_results import Attempt, ProbeResult, gpu_backends, remembered
from perdure.engine.llama.native.source import WAYS, LibrarySource, candidates
from perdure.errors import EngineLibraryError
from perdure.extension import optional_part

if TYPE_CHECKING:
    from perdure.models.registry import Progress

log = logging.getLogger("perdure.engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenLibrary:
    """The library to use, what its probe found, and the same of those before it that are not used."""

    source: LibrarySource
    result: ProbeResult
    passed: tuple[ProbeResult, ...] = ()


def choose() -> ChosenLibrary:
    """The first library that runs here; one whose GPU is ruled out gives way to one that uses a GPU.

    What did not run, and what is used instead, is said in the log when it is found out.
    """
    passed: list[tuple[LibrarySource, ProbeResult]] = []
    tried: list[str] = []
    new = False

    def chosen(source: LibrarySource, result: ProbeResult) -> ChosenLibrary:
        others = tuple(each for _, each in passed if each is not result)
        return _logged(ChosenLibrary(source=source, result=result, passed=others), new)

    try:
        for source in _sources(passed):
            result = remembered(source)
            if result is None:
                new, result = True, _probed(source)
            if result.usable and not result.gpu_problem:
                return chosen(source, result)
            passed.append((source, result))
            tried += [] if result.usable else [str(result)]
    except EngineLibraryError as error:
        # None could be fetched; where some are here, people must hear of those too.
        if not passed:
            raise
        tried.append(str(error))
    for source, result in passed:
        if result.usable:
            return chosen(source, result)
    raise EngineLibraryError(
        f"no llama.cpp library runs on this machine: {'. '.join(tried)}. {WAYS}", tried=tried
    )


def find_library(
    progress: Progress | None = None, agree: Callable[[str, int], bool] | None = None
) -> LibrarySource:
    """The library to use: the user's own build, an installed one, llama-cpp-python's, or one fetched now."""
    for source in candidates():
        return source
    return _fetched(progress, agree)


def _sources(passed: Sequence[tuple[LibrarySource, ProbeResult]]) -> Iterator[LibrarySource]:
    """What is here, then one to fetch: a user's own build is the only one, and a fetched one is here.

    Where one that was `passed` runs without its GPU, only those with GPU backends can be better.
    """
    kinds = set()
    for source in candidates():
        kinds.add(source.kind)
        if any(result.usable for _, result in passed) and not gpu_backends(source):
            continue
        yield source
    if kinds.isdisjoint({"own", "installed"}) and not any(result.usable for _, result in passed):
        yield _fetched()


def _fetched(
    progress: Progress | None = None, agree: Callable[[str, int], bool] | None = None
) -> LibrarySource:
    fetch = optional_part("library for this machine")
    if fetch is None:
        raise EngineLibraryError(f"there is no llama.cpp library here, and no extension fetches one. {WAYS}")
    source: LibrarySource = fetch(progress, agree)
    return source


def _probed(source: LibrarySource) -> ProbeResult:
    """What a probe finds. Without the extension that has it, a library is used as it comes."""
    probe = optional_part("probe of a library")
    if probe is None:
        attempt = Attempt(variant=settings().llama_variant, extra_buffers=True, gpu=True)
        return ProbeResult(folder=str(source.folder), attempts=(attempt,))
    result: ProbeResult = probe(source)
    return result


def _logged(choice: ChosenLibrary, new: bool) -> ChosenLibrary:
    """Say in one line what does not run here and what is used instead, if it was found out just now."""
    parts = []
    for failed in (*choice.passed, choice.result):
        name = Path(failed.folder).name
        if failed.gpu_problem and not choice.result.devices:
            parts.append(f"{name} does not use the GPU: {failed.gpu_problem}")
        elif not failed.usable:
            parts.append(f"{name} cannot run here: {failed.attempts[0]}")
        elif failed.deaths:
            parts.append(f"{name} is used with restrictions: {'; '.join(map(str, failed.attempts))}")
    version = choice.result.attempts[-1].version
    if guard.is_newer(version):
        parts.append(f"llama.cpp {version} is newer than this perdure knows, and passed its checks")
    if parts and new:
        log.warning("%s; `perdure doctor` shows more", ". ".join(parts))
    return choice
