"""Frozen settings. The only module that reads the environment.

A setting is an option of a command, else a variable `PERDURE_*` of the environment, else a line of the config
file, else its default.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from perdure.checks import is_whole
from perdure.errors import InvalidInputError

N_CTX = 4096
"""Tokens that one request can hold, unless somebody says otherwise."""
SLOTS = 4
"""Requests that are served at once."""
QUEUE = 256
"""Requests that may wait."""
Overflow = Literal["error", "drop_oldest", "shift", "fold"]
"""What happens when a conversation no longer fits."""
ReasoningMode = Literal["show", "hide", "capture"]
"""What becomes of a model's reasoning: part of the text, left out, or apart."""
STORE_BYTES = 16 << 30
"""Blocks in a store, at most."""


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

    gpu_layers: int | Literal["auto"] = "auto"
    """How many layers of a model go to the GPU, where there is one."""

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
    kind: type[str] | type[int] | type[float]
    about: str

    @property
    def variable(self) -> str:
        return f"PERDURE_{self.name.upper()}"


@dataclass(frozen=True, slots=True)
class Choice:
    """A value that somebody chose, and where."""

    value: str | int | float
    origin: str


SETTINGS = (
    Setting("model", str, "the model to use when none is named"),
    Setting("store", str, "folder of the sessions"),
    Setting("ctx", int, "context size in tokens"),
    Setting("max_tokens", int, "most tokens of a reply"),
    Setting("temperature", float, "randomness; 0 always takes the likeliest token"),
    Setting("top_p", float, "draw from the likeliest tokens that together have this much"),
    Setting("top_k", int, "draw from the K likeliest tokens; 0: from all"),
    Setting("min_p", float, "drop tokens below this share of the likeliest one"),
    Setting("repeat_penalty", float, "above 1: fewer repetitions"),
    Setting("seed", int, "the same seed gives the same reply"),
    Setting("overflow", str, "what a full context means in chat: error, drop_oldest, shift or fold"),
    Setting("host", str, "address that the server listens on"),
    Setting("port", int, "port that the server listens on"),
    Setting("slots", int, "requests that the server serves at once"),
    Setting("threads", int, "threads of the server's engine"),
    Setting("gpu_layers", str, "layers on the GPU: a number, or auto for as many as fit"),
)
_BY_NAME = {setting.name: setting for setting in SETTINGS}


def settings() -> Settings:
    """The settings of this moment, from the `PERDURE_*` variables of the environment and the config file."""
    chosen = choices()
    llama = os.environ.get("PERDURE_LLAMA")
    store = chosen.get("store")
    return Settings(
        home=_home(),
        model=str(chosen["model"].value) if "model" in chosen else None,
        llama=Path(llama).expanduser() if llama else None,
        llama_variant=os.environ.get("PERDURE_LLAMA_VARIANT") or None,
        sessions=Path(str(store.value)).expanduser() if store else None,
        gpu_layers=_layers(chosen["gpu_layers"]) if "gpu_layers" in chosen else "auto",
    )


def _layers(chosen: Choice) -> int | Literal["auto"]:
    text = str(chosen.value)
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise InvalidInputError(
            f'{chosen.origin}: gpu_layers is "auto" or a whole number from 0, got {chosen.value!r}'
        )
    return int(text)


def choices() -> dict[str, Choice]:
    """What the config file and the environment say, by name; the environment wins."""
    path = config_file()
    found = {name: Choice(value, str(path)) for name, value in read_config(path).items()}
    for setting in SETTINGS:
        if text := os.environ.get(setting.variable):
            found[setting.name] = Choice(
                parse_setting(setting.name, text, setting.variable), setting.variable
            )
    return found


def config_file() -> Path:
    """Where the config file is, or would be."""
    if given := os.environ.get("PERDURE_CONFIG"):
        return Path(given).expanduser()
    if os.environ.get("PERDURE_HOME"):
        return _home() / "config.toml"
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".config") / "perdure" / "config.toml"


def read_config(path: Path) -> dict[str, str | int | float]:
    """The settings in a config file; none if there is no such file."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise InvalidInputError(f"the config file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"the config file {path} is not TOML: {error}") from None
    return {name: parse_setting(name, value, str(path)) for name, value in table.items()}


def parse_setting(name: str, value: object, origin: str) -> str | int | float:
    """A setting's value, of its kind. `origin` is where it was found, for the error."""
    setting = _BY_NAME.get(name)
    if setting is None:
        near = difflib.get_close_matches(name, _BY_NAME, n=1)
        advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(_BY_NAME)}"
        raise InvalidInputError(f"{origin}: there is no setting {name!r}; {advice}")
    try:
        if isinstance(value, str):
            return setting.kind(value)
        if setting.kind is float and is_whole(value):
            return float(value)
        if isinstance(value, setting.kind) and not isinstance(value, bool):
            return value
    except ValueError:
        pass
    kinds = {str: "a text", int: "a whole number", float: "a number"}
    raise InvalidInputError(f"{origin}: {name} is {kinds[setting.kind]}, got {value!r}")


def _home() -> Path:
    home = os.environ.get("PERDURE_HOME")
    if home:
        return Path(home).expanduser()
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data).expanduser() if data else Path.home() / ".local" / "share") / "perdure"
