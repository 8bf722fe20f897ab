"""Models from a Hugging Face hub. The hub's own library answers what and where; the bytes come our way."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from perdure import FetchError, ModelNotFoundError
from perdure.ext.fetching.download import (
    Remote,
    RemoteBytes,
    check_free_space,
    download,
    fetch_lock,
    forget,
    publish,
    unreachable,
    web,
)
from perdure.spi.base import content_digest, read_text
from perdure.spi.models import (
    Header,
    HubSource,
    Progress,
    is_projector,
    parse_header,
    part_names,
    stays_inside,
)

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_PATIENCE = 20.0
_USUAL = "Q4_K_M"
"""What llama.cpp and Ollama take where a repo has several and none was named."""
_CONFIG = "config.json"
_FOLDER_FILE = re.compile(
    r"(?:config|generation_config|tokenizer|tokenizer_config|special_tokens_map|hf_quant_config"
    r"|model\.safetensors\.index)\.json|chat_template\.jinja|model[\w.-]*\.safetensors"
)
"""What a folder of safetensors is made of."""
_MOST_FILES = 1000
_MOST_OFFERS = 64
"""Models of a repo that are looked at."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


def hub_folder(source: HubSource, models: Path) -> Path:
    """Where the files of a repo are kept."""
    return models / "hub" / (source.repo + (f"@{source.revision}" if source.revision else ""))


def hub_place(source: HubSource, models: Path) -> Path | None:
    """The first file of the model, if all of it is here already and it is clear which one is meant."""
    folder = hub_folder(source, models)
    if source.file is None and source.tag is None and is_weights_folder(folder):
        return folder
    if source.file is not None:
        names: Sequence[str] = [source.file]
    else:
        here = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf"))
        names = chosen(here, source.tag)
    if len(names) != 1:
        return None
    parts = [folder / part for part in _all_parts(names[0])]
    return parts[0] if all(part.is_file() for part in parts) else None


def is_weights_folder(folder: Path) -> bool:
    """Whether a folder of safetensors was fetched there, whole: its config comes last."""
    return (folder / _CONFIG).is_file() and any(folder.glob("model*.safetensors"))


def folder_files(files: Sequence[str]) -> list[str]:
    """The files of a repo that holds a model as safetensors; none of any other, or where it has GGUF files.

    Code is never among them.
    """
    names = [name for name in files if _FOLDER_FILE.fullmatch(name)]
    weights = any(name.endswith(".safetensors") for name in names)
    if _CONFIG not in names or not weights or candidates(files, None):
        return []
    return [*sorted(name for name in names if name != _CONFIG), _CONFIG]


def candidates(files: Sequence[str], tag: str | None) -> list[str]:
    """The models among the files of a repo that fit `tag`, each named by its first file."""
    # The names are the server's: one that leads out of its folder must never reach the disk.
    first = {_all_parts(name)[0] for name in files if name.lower().endswith(".gguf") and stays_inside(name)}
    # Vision and audio projectors belong to a model; they are none.
    models = sorted(name for name in first if not is_projector(PurePosixPath(name).name))
    if tag is None:
        return models
    word = re.compile(rf"(?<![a-z0-9_]){re.escape(tag.lower())}(?![a-z0-9_])")
    return [name for name in models if word.search(name.lower())]


def _projector(files: Sequence[str], model: str) -> list[str]:
    """The projector of a model that reads images: the file of its folder with mmproj in its name; of several,
    the one in 16 bits."""
    beside = sorted(
        name
        for name in files
        if name.lower().endswith(".gguf")
        and is_projector(PurePosixPath(name).name)
        and PurePosixPath(name).parent == PurePosixPath(model).parent
        and name != model
        and stays_inside(name)
    )
    by_kind = [name for kind in ("-f16", "_f16", "bf16", "") for name in beside if kind in name.lower()]
    return by_kind[:1]


def chosen(files: Sequence[str], tag: str | None) -> list[str]:
    """The models that a name without a file may mean: of several and no tag, the usual quantisation."""
    matches = candidates(files, tag)
    usual = candidates(files, _USUAL) if tag is None and len(matches) > 1 else []
    return usual if len(usual) == 1 else matches


def fetch_hub(
    source: HubSource,
    models: Path,
    progress: Progress | None = None,
    *,
    endpoint: str | None = None,
    folders: bool = False,
) -> Path:
    """Have the model of `source`, all of its parts, in the folder `models`, as the hub has it now.

    With `folders` that may be a folder of safetensors, which only an engine for such can open.
    """
    from huggingface_hub import HfApi, errors

    api = HfApi(endpoint=endpoint, library_name="perdure")
    folder = hub_folder(source, models)
    with fetch_lock(models, f"hub--{source.repo}"), _plainly(source), web() as client:
        whole = _folder_of(api, source) if folders else []
        names = tuple(whole)
        if not whole:
            model = source.file or _choose(api, source)
            # What is wrong with a repo is said of the model.
            names = _all_parts(model)
            with suppress(errors.HfHubHTTPError):
                names = (*names, *_projector(_files(api, source), model))
        remotes = [_remote(api, source, name) for name in names]
        waiting = [
            (name, remote)
            for name, remote in zip(names, remotes, strict=True)
            if not _is_current(folder / name, remote)
        ]
        total = sum(remote.size or 0 for _, remote in waiting)
        check_free_space(models, total)
        done = 0
        for name, remote in waiting:
            part = models / ".parts" / "hub" / f"{source.repo}@{source.revision or 'main'}" / f"{name}.part"
            if not _link(_hub_blob(source.repo, remote), part):
                download(client, remote, part, _offset(progress, done, total))
            publish(part, folder / name)
            forget(part)
            stamp(folder / name).parent.mkdir(parents=True, exist_ok=True)
            stamp(folder / name).write_text(remote.sha256 or "")
            done += remote.size or 0
    return folder if whole else folder / names[0]


def hub_size(source: HubSource, *, endpoint: str | None = None) -> int:
    """Bytes of the model of `source`, all of its parts, as the hub has it now. Nothing is fetched."""
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint, library_name="perdure")
    with _plainly(source):
        names = _all_parts(source.file or _choose(api, source))
        return sum(_remote(api, source, name).size or 0 for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A model of a repo: its first file, and the bytes of all of its files."""

    file: str
    size: int


def read_offers(source: HubSource) -> tuple[list[Offer], tuple[Header, ...]]:
    """The models of a repo that fit `source`, from the smallest to the largest, and the headers of one.

    Of the files only that many bytes are read: a few MB of the smallest model. In other quantisations a model
    has the same sizes but for its weights, and the list of files says how large those are.
    """
    from huggingface_hub import HfApi

    api = HfApi(library_name="perdure")
    with _plainly(source), web() as client:
        info = api.model_info(source.repo, revision=source.revision, timeout=_PATIENCE, files_metadata=True)
        sizes = {each.rfilename: each.size for each in info.siblings or ()}
        names = [source.file] if source.file else candidates(list(sizes), source.tag)
        if not names:
            raise ModelNotFoundError(f"{source.repo} holds no GGUF file")
        offers = []
        for name in names[:_MOST_OFFERS]:
            parts = _all_parts(name)
            known = [sizes.get(part) for part in parts]
            if None in known:
                # A hub that does not list sizes says them of each file.
                known = [_remote(api, source, part).size for part in parts]
            offers.append(Offer(file=name, size=sum(each or 0 for each in known)))
        offers.sort(key=lambda offer: offer.size)
        headers = []
        for part in _all_parts(offers[0].file):
            remote = _remote(api, source, part)
            path = Path(PurePosixPath(part).name)
            headers.append(parse_header(RemoteBytes(client, remote), path, remote.size or 0))
    return offers, tuple(headers)


def _all_parts(name: str) -> tuple[str, ...]:
    path = PurePosixPath(name)
    return tuple(str(path.with_name(part)) for part in part_names(path.name))


def _files(api: HfApi, source: HubSource) -> list[str]:
    # One request, where the list of files by folder takes pages, and long retries when offline.
    info = api.model_info(source.repo, revision=source.revision, timeout=_PATIENCE)
    return [sibling.rfilename for sibling in info.siblings or ()]


def _folder_of(api: HfApi, source: HubSource) -> list[str]:
    if source.file is not None or source.tag is not None:
        return []
    names = folder_files(_files(api, source))
    if len(names) > _MOST_FILES:
        raise ModelNotFoundError(
            f"{source.repo} has {len(names)} files of a model, at most {_MOST_FILES} are fetched"
        )
    return names


def _choose(api: HfApi, source: HubSource) -> str:
    files = _files(api, source)
    names = chosen(files, source.tag)
    if len(names) == 1:
        return names[0]
    everything = candidates(files, None)
    if not everything:
        if folder_files(files):
            raise ModelNotFoundError(
                f"{source.repo} holds no GGUF file, but a folder of safetensors, which runs on MLX: fetch it "
                f"with `perdure pull {source.repo}`, and use that name again"
            )
        raise ModelNotFoundError(f"{source.repo} holds no GGUF file")
    shown = ", ".join(PurePosixPath(name).name for name in (names or everything)[:12])
    how_many = f"{len(names)} GGUF models" if names else "no GGUF model"
    fits = f" that fit {source.tag!r}" if source.tag else ""
    raise ModelNotFoundError(
        f"{source.repo} holds {how_many}{fits}; name one as {source.repo}:FILE. There are: {shown}"
    )


def _remote(api: HfApi, source: HubSource, name: str) -> Remote:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    url = hf_hub_url(source.repo, name, revision=source.revision, endpoint=api.endpoint)
    known = get_hf_file_metadata(url, endpoint=api.endpoint, timeout=_PATIENCE)
    etag = known.etag or ""
    return Remote(
        url=url,
        # Large files are tagged with the digest of their bytes, small ones with that of a git object.
        sha256=etag if _SHA256.fullmatch(etag) else None,
        size=known.size,
        headers=build_hf_headers(library_name="perdure"),
    )


def hub_cache() -> Path:
    """Where the hub's own library keeps what it and others fetched."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _hub_blob(repo: str, remote: Remote) -> Path | None:
    """The file in the hub's own cache, if it is there whole. Its name is its digest, and that is proved."""
    if remote.sha256 is None:
        return None
    blob = hub_cache() / f"models--{repo.replace('/', '--')}" / "blobs" / remote.sha256
    try:
        whole = blob.stat().st_size == remote.size and content_digest(blob) == remote.sha256
    except OSError:
        return None
    return blob if whole else None


def _link(blob: Path | None, target: Path) -> bool:
    """Have a file of the hub's cache here too, without a second copy of its bytes where that can be done."""
    if blob is None:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(blob, target)
    except OSError:
        # Another disk: the bytes are copied, which is still faster than to fetch them.
        shutil.copyfile(blob, target)
    return True


def stamp(path: Path) -> Path:
    """Where the digest that a file was verified against is noted."""
    return path.parent / ".digests" / f"{path.name}.sha256"


def _is_current(path: Path, remote: Remote) -> bool:
    try:
        return (
            remote.sha256 is not None
            and path.stat().st_size == remote.size
            and read_text(stamp(path)) == remote.sha256
        )
    except (OSError, ValueError):
        return False


def _offset(progress: Progress | None, before: int, total: int) -> Progress | None:
    if progress is None:
        return None
    report = progress
    return lambda done, _: report(before + done, total or None)


@contextmanager
def _plainly(source: HubSource) -> Iterator[None]:
    """Turn the hub library's errors into ours."""
    import httpx
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise FetchError(
            f"{source.repo} asks for its terms to be accepted: accept them on its page, "
            "then log in with `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{source.repo} has no revision {source.revision!r}") from error
    except errors.EntryNotFoundError as error:
        raise ModelNotFoundError(f"{source.repo} has no file {source.file!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"the hub has no model {source.repo}, or shows it only to others; if it is private, "
            "log in with `hf auth login`"
        ) from error
    except errors.HFValidationError as error:
        raise ModelNotFoundError(f"{source.repo!r} is not a name that a hub can have") from error
    except errors.OfflineModeIsEnabled as error:
        raise FetchError(
            f"{source} is not here yet, and HF_HUB_OFFLINE forbids to fetch it; unset it and try again"
        ) from error
    except errors.HfHubHTTPError as error:
        raise FetchError(f"the hub did not give {source}: {_first_line(error)}") from error
    except (OSError, httpx.HTTPError) as error:
        raise _out_of_reach(source, error) from error
    except Exception as error:
        # The HTTP client of the hub library differs from release to release.
        if type(error).__module__.partition(".")[0] not in (
            "httpx",
            "httpx2",
            "httpcore",
            "httpcore2",
            "requests",
        ):
            raise
        raise _out_of_reach(source, error) from error


def _out_of_reach(source: HubSource, error: Exception) -> FetchError:
    return FetchError(
        f"the hub could not be reached for {source}: {_ERRNO.sub('', _first_line(error))}. "
        f"{unreachable(error)}, or name a mirror in HF_ENDPOINT. Models that are here already: `perdure ls`"
    )


_ERRNO = re.compile(r"^\[Errno -?\d+\] ")
"""A number of the system's before its words."""


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
