"""What a model is opened with, each option said once: how it is loaded, what its context has, how it serves.

An option that nobody chose is None: it is then as usual, as tuned, or as the engine finds best. What
`perdure.open`, `Model` and `Model.context`, the worker process, the commands, the config file, one of several
models and the tables in the docs have is made from it, and `keywords.py` beside it is written (`make api`).

    flash: bool | None = option(None, usual=True, help="flash attention", surfaces=(), peers=("flash_attn",))

A new option is one field, and the engine that reads it. Extensions have options too (`Extension.options`):
those stand in `extended`, and an extension is loaded when one of its options is chosen or listed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypedDict, cast

from perdure.engine_config.keywords import EXTENDED, ContextKeywords, EngineKeywords, LoadingKeywords
from perdure.errors import InvalidInputError
from perdure.extension import brought
from perdure.options import Option, option, options_of, refuse_unknown

N_CTX = 4096
"""Tokens that one request can hold, unless `n_ctx` is given."""
SLOTS = 4
"""Requests that are served at once."""
QUEUE = 256
"""Requests that may wait."""
N_BATCH = 512
"""Tokens of one step, at most."""
STORE_BYTES = 16 << 30
"""Blocks in a store, at most."""
MAX_SEQUENCES = 256
MAX_THREADS = 512
CACHE_BITS = {
    "f32": 32.0,
    "f16": 16.0,
    "bf16": 16.0,
    "q8_0": 8.5,
    "q5_1": 6.0,
    "q5_0": 5.5,
    "q4_1": 5.0,
    "q4_0": 4.5,
}
"""Bits of a number in each type of the K/V cache."""
EXACT_TYPES = frozenset({"f32", "f16", "bf16"})
"""Those that nothing is lost with."""
_LARGEST = 3.4e38
"""The engines' floats end here."""
_COMMANDS = ("chat", "run", "serve")
_BYTES = "a number of bytes, 0 for none"


class KvKeywords(TypedDict):
    """The types of K and V as options, and as fields of an `Identity`."""

    k_type: str
    v_type: str


class KvType(NamedTuple):
    """The types of K and V."""

    k: str = "f16"
    v: str = "f16"

    @classmethod
    def parse(cls, text: object) -> KvType:
        """Of one word for both, or of K:V."""
        if not isinstance(text, str):
            raise InvalidInputError(f"kv_type is a text such as q8_0 or q8_0:f16, got {text!r}")
        k, colon, v = text.partition(":")
        return cls(k, v if colon else k)

    def __str__(self) -> str:
        """One word for both."""
        return self.k if self.k == self.v else f"{self.k}:{self.v}"

    @property
    def bits(self) -> float:
        """Of a number of K and one of V together; as f16 where the type is not known."""
        return CACHE_BITS.get(self.k, 16.0) + CACHE_BITS.get(self.v, 16.0)

    @property
    def keywords(self) -> KvKeywords:
        """As keywords of `Model.context`, `perdure.open` and `Identity`."""
        return {"k_type": self.k, "v_type": self.v}


F16 = KvType()


@dataclass(frozen=True, kw_only=True)
class _Config:
    """Options that were chosen, each checked; those that were not are None."""

    CALL: ClassVar[str]
    """The call whose keywords they are."""
    extended: Mapping[str, Any] = field(default_factory=dict)
    """Options of extensions that were chosen."""

    def __post_init__(self) -> None:
        for name, value in self.extended.items():
            extended_option(name).check(value, none=False)
        for name, each in options_of(type(self)).items():
            value = getattr(self, name)
            if each.kind is list and isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
            each.check(value, none=False)

    @classmethod
    def of(cls, chosen: Mapping[str, Any], call: Callable[..., object], *, none: bool = True) -> Self:
        """From the keywords of a call whose signature names each option. Without `none`, None is no value for
        one that has a usual value."""
        known = options_of(cls)
        refuse_unknown([name for name in chosen if name in known or not _is_extended(name, cls.CALL)], call)
        for name, value in chosen.items():
            each = known[name] if name in known else extended_option(name)
            if value is None and each.usual is not None and not none:
                raise InvalidInputError(f"{name} is {each.range}, got None")
        return cls.from_options(chosen)

    @classmethod
    def from_options(cls, chosen: Mapping[str, Any]) -> Self:
        """From options by their names, those of extensions among them."""
        known = options_of(cls)
        own = {name: value for name, value in chosen.items() if name in known}
        rest = {name: value for name, value in chosen.items() if name not in known and value is not None}
        return cls(**own, extended=rest)

    def _chosen(self, kind: type[_Config]) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in options_of(kind)}
        extended = {name: value for name, value in self.extended.items() if _is_extended(name, kind.CALL)}
        return {name: value for name, value in values.items() if value is not None} | extended


@dataclass(frozen=True, kw_only=True)
class LoadingConfig(_Config):
    """How a model is loaded."""

    CALL = "Model"
    gpu_layers: int | Literal["auto"] | None = option(
        None,
        low=0,
        help="layers of the model on the GPU; auto: as many as fit",
        unset="auto",
        metavar="N|auto",
        affects_memory=True,
        peers=("n_gpu_layers", "num_gpu"),
    )
    cpu_experts: int | Literal["all", "auto"] | None = option(
        None,
        low=0,
        help="layers whose experts stay in memory and are computed by the CPU; auto: as few as must",
        unset="auto",
        metavar="N|all|auto",
        affects_memory=True,
        peers=("n_cpu_moe",),
    )
    devices: Sequence[str] | None = option(
        None,
        help="name of a GPU to use",
        unset="all",
        command="device",
        metavar="NAME",
        surfaces=_COMMANDS,
        affects_memory=True,
    )
    tensor_split: Sequence[float] | None = option(
        None,
        low=0,
        what="shares such as 3,1, none below 0",
        help="share of the model for each GPU",
        unset="by free memory",
        metavar="A,B",
        surfaces=_COMMANDS,
    )
    kv_offload: bool | None = option(
        None,
        usual=True,
        help="keep the K/V cache on the GPU too",
        surfaces=_COMMANDS,
        affects_memory=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tensor_split is not None and not sum(self.tensor_split):
            shares = options_of(LoadingConfig)["tensor_split"].range
            raise InvalidInputError(f"tensor_split is {shares}, got {self.tensor_split!r}")

    @property
    def loading(self) -> LoadingKeywords:
        """What was chosen, as keywords of `Model`."""
        return cast("LoadingKeywords", self._chosen(LoadingConfig))


@dataclass(frozen=True, kw_only=True)
class ContextConfig(_Config):
    """What a context has, besides how many sequences of how many tokens. `kv_type` becomes `k_type` and
    `v_type`."""

    CALL = "Model.context"
    threads: int | None = option(
        None,
        low=1,
        high=MAX_THREADS,
        help="threads that compute",
        unset="by the machine",
        surfaces=("serve", "file", "models"),
        affects_reply=False,
        peers=("n_threads", "num_thread"),
    )
    n_batch: int | None = option(
        None,
        low=1,
        high=1 << 16,
        usual=N_BATCH,
        help="most tokens of a prompt in one step",
        surfaces=(),
        affects_reply=False,
        affects_memory=True,
    )
    shared: bool | None = option(
        None,
        usual=False,
        help="one pool of cells for all sequences, in place of a part for each",
        surfaces=(),
        peers=("kv_unified",),
    )
    kv_type: str | None = option(
        None,
        what=f"one of {', '.join(CACHE_BITS)}, or two of them as K:V",
        help="type of the K/V cache: f16, q8_0, q4_0 and others, or one for K and one for V",
        unset="f16",
        metavar="TYPE|K:V",
        affects_memory=True,
    )
    k_type: str | None = option(
        None,
        choices=tuple(CACHE_BITS),
        usual="f16",
        help="type of the keys alone, in place of kv_type",
        surfaces=(),
        affects_memory=True,
        peers=("type_k", "cache_type_k"),
    )
    v_type: str | None = option(
        None,
        choices=tuple(CACHE_BITS),
        usual="f16",
        help="type of the values alone, in place of kv_type",
        surfaces=(),
        affects_memory=True,
        peers=("type_v", "cache_type_v"),
    )
    flash: bool | None = option(
        None,
        usual=True,
        help="flash attention",
        surfaces=(),
        affects_memory=True,
        peers=("flash_attn",),
    )
    swa_full: bool | None = option(
        None,
        usual=True,
        help="keep rows that have slid out of a window, so that a sequence can be cut short",
        surfaces=(),
    )
    rope_freq_base: float | None = option(
        None, low=0, high=_LARGEST, usual=0.0, help="base of the rotation; 0: the model's own", surfaces=()
    )
    rope_freq_scale: float | None = option(
        None, low=0, high=_LARGEST, usual=0.0, help="scale of the rotation; 0: the model's own", surfaces=()
    )
    trace: str | Sequence[str] | None = option(
        None,
        checked=False,
        what="hidden, ffn, router, or several of them",
        help="keep what layers compute in every step, which takes longer: hidden, ffn, router",
        surfaces=(),
    )
    trace_layers: Sequence[int] | None = option(
        None,
        low=0,
        what="numbers of layers, from 0",
        help="layers that trace is for",
        unset="all",
        surfaces=(),
    )

    def __post_init__(self) -> None:
        if self.kv_type is not None:
            if self.k_type is not None or self.v_type is not None:
                raise InvalidInputError("kv_type is k_type and v_type in one; leave it or those out")
            for name, value in {**KvType.parse(self.kv_type).keywords, "kv_type": None}.items():
                object.__setattr__(self, name, value)
        super().__post_init__()

    @property
    def kv(self) -> KvType:
        """The types of K and V, f16 for what was not chosen."""
        return KvType(self.k_type or "f16", self.v_type or "f16")

    @property
    def has_kv_type(self) -> bool:
        """Whether a type was chosen."""
        return self.k_type is not None or self.v_type is not None

    @property
    def context(self) -> ContextKeywords:
        """What was chosen, as keywords of `Model.context`."""
        return cast("ContextKeywords", self._chosen(ContextConfig))


@dataclass(frozen=True, kw_only=True)
class EngineConfig(LoadingConfig, ContextConfig):
    """What a model is opened with."""

    CALL = "open"
    n_ctx: int | Literal["auto"] | None = option(
        None,
        low=1,
        usual=N_CTX,
        help="context size: tokens of prompt and reply together; auto: as many as fit",
        command="ctx",
        metavar="N|auto",
        # A process that shares an engine needs one that holds as much, which is compared as a number.
        affects_reply=False,
        affects_memory=True,
        peers=("num_ctx", "context_length", "ctx", "ctx_size"),
    )
    slots: int | Literal["auto"] | None = option(
        None,
        low=1,
        usual=SLOTS,
        help="requests that are answered at once, others wait; auto: as many as fit",
        metavar="N|auto",
        surfaces=("serve", "file", "models"),
        affects_reply=False,
        affects_memory=True,
        peers=("n_parallel", "num_parallel"),
    )
    swap_slots: int | None = option(
        None,
        low=0,
        help="conversations whose state stays on the device between two requests",
        unset="a few where a device has room, none on a CPU",
        surfaces=(),
        affects_reply=False,
    )
    exact: bool | None = option(
        None,
        usual=False,
        help="decode each reply alone, so that its last bit never depends on others",
        surfaces=("run", "serve"),
    )
    queue: int | None = option(
        None,
        low=0,
        usual=QUEUE,
        help="requests that may wait; a server answers more with 429",
        surfaces=("serve", "file"),
        affects_reply=False,
    )
    stall: float | None = option(
        None,
        low=0,
        high=3600,
        help="seconds of a prompt's chunk while others wait",
        unset="0.05",
        surfaces=(),
        affects_reply=False,
    )
    cache: int | None = option(
        None,
        low=0,
        high=1 << 62,
        what=_BYTES,
        help="bytes of state that are kept in memory between requests",
        unset="an eighth of the memory, at most 2 GiB or a twelfth of it",
        surfaces=(),
        affects_reply=False,
    )
    store_bytes: int | None = option(
        None,
        low=0,
        high=1 << 62,
        usual=STORE_BYTES,
        unset="16 GiB",
        what=_BYTES,
        help="bytes of state that the store keeps; texts of sessions are always kept",
        surfaces=(),
        affects_reply=False,
    )
    blocks: Sequence[str] | None = option(
        None,
        help="places where machines share state: file://, s3:// or redis://, the faster first",
        surfaces=(),
        affects_reply=False,
    )
    force_kv: bool | None = option(
        None,
        usual=False,
        help="use a K/V type that was measured to cost the model much",
        surfaces=_COMMANDS,
        affects_reply=False,
    )
    adapters: Mapping[str, float] | None = option(
        None,
        checked=False,
        what="files with their scales",
        help="LoRAs and control vectors for replies that name no others: files with their scales",
        surfaces=(),
    )
    adapter_names: Mapping[str, str | os.PathLike[str]] | None = option(
        None,
        checked=False,
        what="files by name",
        help="files of adapters by the names that replies may use",
        surfaces=(),
    )

    @property
    def distinctive(self) -> dict[str, Any]:
        """What was chosen that changes replies: processes that share an engine have to agree on it."""
        known = options_of(EngineConfig)
        chosen = self._chosen(EngineConfig)
        options = {name: known[name] if name in known else extended_option(name) for name in chosen}
        return {
            name: value
            for name, value in chosen.items()
            if options[name].affects_reply and not (value is False and options[name].usual is False)
        }

    @property
    def keywords(self) -> EngineKeywords:
        """What was chosen, as keywords of `perdure.open`."""
        return cast("EngineKeywords", self._chosen(EngineConfig))

    def overlaid(self, other: EngineConfig) -> EngineConfig:
        """The same, with what `other` has chosen in place of it. The types of K and V belong together."""
        base = self.without_kv_type() if other.has_kv_type else self
        own = {
            name: value for name in options_of(EngineConfig) if (value := getattr(other, name)) is not None
        }
        return replace(base, **own, extended={**base.extended, **other.extended})

    def without_kv_type(self) -> EngineConfig:
        return replace(self, k_type=None, v_type=None)

    def resolved(self) -> EngineConfig:
        """The same, with what options of extensions are for an engine in their place."""
        extended: dict[str, Any] = {}
        for name, value in self.extended.items():
            resolve = extended_option(name).resolve
            extended |= {name: value} if resolve is None else resolve(value)
        return replace(self, extended=extended)


@functools.cache
def extended_options() -> Mapping[str, Option]:
    """The options that extensions have, by their fields. A name that is taken stays what it is."""
    kinds = reversed(list(brought("options")))
    options = {name: each for kind in kinds for name, each in options_of(kind).items()}
    return {name: each for name, each in options.items() if name not in options_of(EngineConfig)}


def extended_option(name: str) -> Option:
    """The option of an extension that is called so. An error names the extension where that is not there."""
    if name in EXTENDED and name not in extended_options():
        raise InvalidInputError(
            f"{name} is an option of the extension {EXTENDED[name]}, which is not installed or cannot be "
            "used: `perdure doctor` says why"
        )
    return extended_options()[name]


def _is_extended(name: str, call: str) -> bool:
    return (name in EXTENDED or name in extended_options()) and call in extended_option(name).calls


def own_options() -> dict[str, Option]:
    """The options of `perdure.open`, by their fields: those of a runtime, of loading, of a context."""
    known = options_of(EngineConfig)
    kinds = (EngineConfig, LoadingConfig, ContextConfig)
    return {each.name: known[each.name] for kind in kinds for each in _own_fields(kind)}


def engine_options() -> dict[str, Option]:
    """The same, and those of extensions."""
    extended = extended_options().items()
    return own_options() | {name: each for name, each in extended if EngineConfig.CALL in each.calls}


def _own_fields(kind: type) -> list[Any]:
    return [each for each in fields(kind) if each.name in kind.__annotations__]
