"""Frozen settings. The only module that reads the environment.

A setting is an option of a command, else a variable `PERDURE_*` of the environment, else a line of the config
file, else its default.
"""

from __future__ import annotations

import difflib
import functools
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from perdure.atomic import read_text
from perdure.checks import is_whole
from perdure.engine_config import engine_options, own_options
from perdure.errors import InvalidInputError
from perdure.options import Option
from perdure.request_options import options_of_replies

Overflow = Literal["error", "drop_oldest", "shift", "fold"]
"""What happens when a conversation no longer fits."""
ReasoningMode = Literal["show", "hide", "capture"]
"""What becomes of a model's reasoning: part of the text, left out, or apart."""
Value = str | int | float | bool | list[str]
"""Of a setting in the config file."""
SETTLED = 4096
"""Tokens of a next prompt's beginning that a server reads while it is idle, after each turn."""
WARMED = 16_384
"""Tokens of known clients' prompts that a server computes again after its start, while it is idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where perdure keeps its files, which model it uses when none is named, and which engine library."""

    home: Path
    model: str | None
    llama: Path | None = None
    """A folder with the user's own build of llama.cpp."""
    llama_variant: str | None = None
    """The CPU variant to load, such as `haswell`; else the best one that this CPU runs."""
    sessions: Path | None = None
    """A folder for the store, instead of the one under `home`."""
    database: str | None = None
    """The URL of a database that has the sessions, instead of a folder."""

    ollama_models: tuple[Path, ...] = ()
    """Folders where Ollama keeps models on this machine."""
    lm_studio_models: tuple[Path, ...] = ()
    """The same for LM Studio."""
    gpu_layers: int | Literal["auto"] = "auto"
    """How many layers of a model go to the GPU, where there is one."""
    cpu_experts: int | Literal["all", "auto"] = "auto"
    """Of how many layers the experts stay in the machine's memory."""
    encrypt: str | None = None
    """The file of the key that encrypts state on the disk, or "cluster"."""
    engine: str | None = None
    """The backend of the library that is fetched where there is none; "auto" is the best for the machine."""

    @property
    def models(self) -> Path:
        return self.home / "models"

    @property
    def store(self) -> Path:
        """Where the commands keep state between runs."""
        return self.sessions or self.home / "store"

    @property
    def engines(self) -> Path:
        """Where llama.cpp libraries are installed, one folder each."""
        return self.home / "engines"


@dataclass(frozen=True, slots=True)
class Setting:
    """What can stand in the config file: a name, the kind of its value, and what it means."""

    name: str
    kind: type[str] | type[int] | type[float] | type[bool] | type[list[str]]
    about: str
    words: tuple[str, ...] = ()
    """What it may be besides."""

    @property
    def variable(self) -> str:
        return f"PERDURE_{self.name.upper()}"


@dataclass(frozen=True, slots=True)
class ChosenValue:
    """A value that was chosen, and where."""

    value: Value
    origin: str


def _setting_of(option: Option) -> Setting:
    return Setting(option.command, _FILE_KINDS.get(option.kind, list), option.help, option.words)


_FILE_KINDS: dict[type, Any] = {float: float, int: int, bool: bool, str: str}
"""How an option stands in the file; one of several texts or entries is a list of texts."""
SETTINGS = (
    Setting("model", str, "the model to use when none is named"),
    Setting("store", str, "folder of the sessions, or the URL of a PostgreSQL database"),
    Setting("store_size", float, "most GiB of state that the store keeps; sessions' texts are always kept"),
    Setting("encrypt", str, "file with the key that encrypts state on the disk, or cluster"),
    *(_setting_of(each) for each in own_options().values() if "file" in each.surfaces),
    *(
        Setting(each.name, _FILE_KINDS.get(each.kind, list), each.help)
        for each in options_of_replies().values()
    ),
    Setting("overflow", str, "what a full context means in chats: error, drop_oldest, shift or fold"),
    Setting("host", str, "address that the server listens on"),
    Setting("port", int, "port that the server listens on"),
    Setting("engine", str, "library to fetch first: cpu, vulkan, cuda, cuda12, metal, or auto for the best"),
    Setting("lora", list, "LoRAs for every reply, each as FILE or FILE:SCALE"),
    Setting(
        "control_vector",
        list,
        "control vectors for every reply, each as FILE, FILE:SCALE or FILE@FIRST-LAST:SCALE",
    ),
    Setting("adapter", list, "adapters that clients of the server may name: NAME=FILE or NAME=FILE:SCALE"),
    Setting("alias", list, "further names of the server's model"),
    Setting("allow_host", list, "further host names of the server"),
    Setting("cors", list, "sites whose pages may use the server"),
    Setting("strict", bool, "whether the server refuses fields that are not known"),
    Setting(
        "stable_prefix", bool, "whether the server moves text that changes at every turn behind the rest"
    ),
    Setting("log_level", str, "least level of the server's log: debug, info, warning or error"),
    Setting("log_text", bool, "whether the server's log has messages and replies"),
    Setting("body_bytes", int, "most bytes of a request to the server"),
    Setting("messages", int, "most messages of a request to the server"),
    Setting("requests", int, "most requests at once in the server"),
    Setting("request_seconds", float, "seconds that a request to the server may take"),
    Setting("body_seconds", float, "seconds that the body of a request may take to arrive"),
    Setting("response_days", float, "days that the server keeps a stored response"),
    Setting("grace", float, "seconds for replies to finish when the server stops"),
    Setting("drain", float, "seconds before that in which the server answers and says that it is draining"),
)
_SPOKEN = {"true": True, "yes": True, "on": True, "1": True}
_SPOKEN |= {"false": False, "no": False, "off": False, "0": False}
_BY_NAME = {setting.name: setting for setting in SETTINGS}


@functools.cache
def all_settings() -> dict[str, Setting]:
    """By name, with those of extensions, which have no variable."""
    options = [each for each in engine_options().values() if "file" in each.surfaces]
    return _BY_NAME | {each.command: _setting_of(each) for each in options if each.command not in _BY_NAME}


def settings() -> Settings:
    """The settings of this moment, from the `PERDURE_*` variables of the environment and the config file."""
    chosen = choices()
    llama = os.environ.get("PERDURE_LLAMA")
    store = str(chosen["store"].value) if "store" in chosen else ""
    return Settings(
        home=_home(),
        model=str(chosen["model"].value) if "model" in chosen else None,
        llama=Path(llama).expanduser() if llama else None,
        llama_variant=os.environ.get("PERDURE_LLAMA_VARIANT") or None,
        sessions=Path(store).expanduser() if store and "://" not in store else None,
        database=store if "://" in store else None,
        ollama_models=_ollama_models(),
        lm_studio_models=_lm_studio_models(),
        gpu_layers=cast("int | Literal['auto']", _count(chosen, "gpu_layers")),
        cpu_experts=cast("int | Literal['all', 'auto']", _count(chosen, "cpu_experts")),
        encrypt=str(chosen["encrypt"].value) if "encrypt" in chosen else None,
        engine=str(chosen["engine"].value) if "engine" in chosen else None,
    )


def _count(chosen: dict[str, ChosenValue], name: str) -> int | str:
    """A whole number from 0, or a word: "auto" where nobody chose."""
    if name not in chosen:
        return "auto"
    value, origin = chosen[name].value, chosen[name].origin
    if isinstance(value, str):
        return value
    if not is_whole(value) or value < 0:
        raise InvalidInputError(f"{origin}: {name} is from 0, got {value!r}")
    return value


def choices() -> dict[str, ChosenValue]:
    """What the config file and the environment say, by name; the environment wins."""
    path = config_file()
    values = {name: ChosenValue(value, str(path)) for name, value in read_config(path).items()}
    for setting in SETTINGS:
        if text := os.environ.get(setting.variable):
            values[setting.name] = ChosenValue(
                parse_setting(setting.name, text, setting.variable), setting.variable
            )
    return values


def config_file() -> Path:
    """Where the config file is, or would be."""
    if path := os.environ.get("PERDURE_CONFIG"):
        return Path(path).expanduser()
    if os.environ.get("PERDURE_HOME"):
        return _home() / "config.toml"
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".config") / "perdure" / "config.toml"


def read_config(path: Path) -> dict[str, Value]:
    """The settings in a config file; none if there is no such file."""
    try:
        table = tomllib.loads(read_text(path, regular=False))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise InvalidInputError(f"the config file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"the config file {path} is not TOML: {error}") from None
    return {name: parse_setting(name, value, str(path)) for name, value in table.items()}


def find_setting(name: str, origin: str | None = None) -> Setting:
    """The setting of a name. `origin` is where it was found, for the error."""
    setting = _BY_NAME.get(name) or all_settings().get(name)
    if setting is None:
        near = difflib.get_close_matches(name, all_settings(), n=1)
        advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(all_settings())}"
        where = f"{origin}: " if origin else ""
        raise InvalidInputError(f"{where}there is no setting {name!r}; {advice}")
    return setting


def parse_setting(name: str, value: object, origin: str | None = None) -> Value:
    """A setting's value, of its kind. `origin` is where it was found, for the error.

    A text, as it comes from the environment, may stand for any kind: several texts have commas between them.
    """
    setting = find_setting(name, origin)
    if isinstance(value, str) and value in setting.words:
        return value
    if (parsed := _of_kind(setting.kind, value)) is None:
        where = f"{origin}: " if origin else ""
        expected = " or ".join((_KINDS[setting.kind], *setting.words))
        raise InvalidInputError(f"{where}{name} is {expected}, got {value!r}")
    return parsed


_KINDS: dict[type, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list of texts",
}


def _of_kind(kind: type, value: object) -> Value | None:
    if kind is list:
        if isinstance(value, str):
            return [part for part in map(str.strip, value.split(",")) if part]
        return value if isinstance(value, list) and all(isinstance(each, str) for each in value) else None
    if kind is bool:
        if isinstance(value, str):
            return _SPOKEN.get(value.lower())
        return value if isinstance(value, bool) else None
    try:
        # A number stands for its text too: `gpu_layers = 20`.
        if isinstance(value, str) or (kind in (float, str) and is_whole(value)):
            return kind(value)  # type: ignore[no-any-return]
    except ValueError:
        return None
    return value if isinstance(value, (str, int, float)) and type(value) is kind else None


def checks_prompts() -> bool:
    """Whether every word of a prompt is checked for where it comes from (`ext/inspection/provenance.py`)."""
    return os.environ.get("PERDURE_CHECK_PROMPTS") == "1"


def _ollama_models() -> tuple[Path, ...]:
    """Where Ollama keeps models: as its own variable says, or below the user's home or its service's."""
    if folder := os.environ.get("OLLAMA_MODELS"):
        return (Path(folder).expanduser(),)
    return (Path.home() / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models"))


def _lm_studio_models() -> tuple[Path, ...]:
    """Where LM Studio keeps models: it notes its folder in a file, where that is not the usual one."""
    home = Path.home()
    try:
        pointed = [Path(read_text(home / ".lmstudio-home-pointer").strip())]
    except (OSError, ValueError):
        pointed = []
    usual = [home / ".lmstudio", home / ".cache" / "lm-studio"]
    return tuple(dict.fromkeys(folder / "models" for folder in (*pointed, *usual)))


def _home() -> Path:
    home = os.environ.get("PERDURE_HOME")
    if home:
        return Path(home).expanduser()
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data).expanduser() if data else Path.home() / ".local" / "share") / "perdure"
