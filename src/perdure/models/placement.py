"""How many bytes of a model lie where, by layers, widths and bits, from the headers of its files alone.

An 8B model of 32 layers, four requests of 4,096 tokens, in f16 on a CPU:

    weights   4,308 MiB   the tensors
    cache     2,048 MiB   4 x 4,096 cells x 32 layers x (1,024 + 1,024) values x 2 bytes
    compute     122 MiB   buffers of a step of 512 tokens, and a row of logits a request

The formulas of the compute buffers were fitted to what llama.cpp reserves; `python -m bench.fit` holds them
against what it really takes.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypedDict

import numpy as np

from perdure import system
from perdure.checks import is_whole
from perdure.engine_config import CACHE_BITS, F16, N_BATCH, N_CTX, KvType
from perdure.memory import FullAttention, Hybrid, MemorySpec, Recurrent, SlidingWindow
from perdure.models.header import Header, Strings

FitLevel: TypeAlias = Literal["fits", "tight", "not"]

ROWS = 64
"""Rows of logits a step can give: the engine reserves memory for as many."""
SPARE = 0.1
"""Of what is free, this share is left to others; a model that needs some of it is `tight`."""
LEAST_CONTEXT = 4096
"""Tokens of a request that are chosen, at least, where the model was trained for as many."""
SLOT_CHOICES = (4, 2, 1)
"""Requests at once: as many of these as fit."""
CELLS = 256
"""A sequence's cells come in multiples of this."""
_READ_UP_TO = 512 << 20
"""Bytes of weights that are read. In large pages a step takes 1 to 2% less time than over the pages of a
file, but to read more would hold up the start for too long."""
_REARRANGED = (
    ("amx_int8", frozenset({"Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"})),
    ("asimddp", frozenset({"Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"})),
    ("avx2", frozenset({"Q4_0", "Q4_K", "IQ4_NL"})),
)
"""What a processor must be able to do, and the types that the engine then rearranges for its kernels."""


def judge(needed: float, free: float) -> FitLevel:
    """Whether so many bytes fit into those that are free: with some left, just so, or not."""
    if needed <= free * (1 - SPARE):
        return "fits"
    return "tight" if needed <= free else "not"


def is_read(size: int) -> bool:
    """Whether weights of so many bytes are read: where that costs little time and memory, and pays. Others
    are mapped."""
    room = system.available_memory()
    return room is not None and size <= min(_READ_UP_TO, room // 4) and system.has_large_pages()


def rearranged_types(flags: frozenset[str]) -> frozenset[str]:
    """The types of tensors that the engine rearranges on a processor with these flags."""
    return next((types for flag, types in _REARRANGED if flag in flags), frozenset())


@functools.cache
def _rearranged_here() -> frozenset[str]:
    return rearranged_types(system.cpu_flags())


# What the header says.

# The engine's own lists (llm_arch_is_recurrent, llm_arch_is_hybrid, and the architectures that
# turn their window on), by the names that files carry.
RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
HYBRID = frozenset(
    {
        "bailingmoe3",
        "deepseek4",
        "falcon-h1",
        "glm5-next",
        "granitehybrid",
        "jamba",
        "kimi-k3",
        "kimi-linear",
        "lfm2",
        "lfm2moe",
        "minimax-01",
        "nemotron_h",
        "nemotron_h_moe",
        "plamo2",
        "qwen35",
        "qwen35moe",
        "qwen3next",
        "qwen4exp",
    }
)
# A window in the metadata means nothing elsewhere: the engine reads it for phi3 and llama, say,
# and attends to everything. The number is the window where the metadata names none.
SLIDING: dict[str, int] = {
    "afmoe": 0,
    "cohere2": 0,
    "cohere2moe": 0,
    "dflash": 0,
    "dots3note": 0,
    "exaone-moe": 128,
    "exaone4": 0,
    "gemma-embedding": 0,
    "gemma2": 4096,
    "gemma3": 0,
    "gemma3n": 0,
    "gemma4": 0,
    "gemma4-assistant": 0,
    "gpt-oss": 0,
    "granite_swa": 0,
    "laguna": 0,
    "llama4": 8192,
    "maple": 0,
    "mellum": 0,
    "mimo2": 0,
    "modern-bert": 0,
    "muse-glimmer": 0,
    "olmo2": 0,
    "plamo3": 0,
    "smallthinker": 0,
    "spark2_5": 0,
    "step35": 0,
}
# Hybrids whose attention layers are every n-th one, where the metadata does not say.
_ATTENTION_INTERVAL = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "qwen4exp": 4}
ASSISTANTS = {"gemma4-assistant": "gemma4"}
"""Drafters that read hidden states, keys and values of another model, and the architecture of that one."""
# Architectures whose later layers read the cells of the first ones.
_LAYERS_WITH_CELLS = {"gemma3n": 20}
_BYTES_F16 = 2


class Facts:
    """The metadata of one architecture; its keys without the architecture in front."""

    def __init__(self, header: Header, architecture: str) -> None:
        self._header = header
        self._architecture = architecture

    def integer(self, key: str) -> int | None:
        return self._header.integer(f"{self._architecture}.{key}")

    def per_layer(self, key: str, layers: int) -> list[int] | None:
        """A value that files give once for all layers, or as an array with one for each."""
        value = self._header.metadata.get(f"{self._architecture}.{key}")
        if is_whole(value):
            return [value] * layers
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and len(value) >= layers:
            return [int(v) for v in value[:layers]]
        return None

    def largest(self, key: str) -> int | None:
        value = self._header.metadata.get(f"{self._architecture}.{key}")
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and len(value):
            return int(value.max())
        return self.integer(key)

    def vocabulary(self) -> int | None:
        tokens = self._header.metadata.get("tokenizer.ggml.tokens")
        return len(tokens) if isinstance(tokens, Strings) else self.integer("vocab_size")

    def memory(self) -> tuple[type[MemorySpec], int | None]:
        window = self.largest("attention.sliding_window")
        if self._architecture in RECURRENT:
            return Recurrent, None
        if self._architecture in HYBRID:
            return Hybrid, window or None
        if self._architecture in SLIDING:
            effective = SLIDING[self._architecture] if window is None else window
            if effective > 0:
                return SlidingWindow, effective
        return FullAttention, None

    def kv_bytes_per_token(self, memory: type[MemorySpec]) -> int | None:
        if not memory.has_rows:
            return 0
        layers = self.integer("block_count")
        if layers is None or not 0 <= layers <= len(self._header.tensors) or self.key_length() is None:
            return None
        return _BYTES_F16 * sum(k + v for k, v in self.cache_widths(layers))

    def cache_widths(self, layers: int) -> list[tuple[int, int]]:
        """Values of K and of V that a token adds to each layer; nothing where the file does not say."""
        kv_heads = self.per_layer("attention.head_count_kv", layers)
        kv_heads = kv_heads or self.per_layer("attention.head_count", layers)
        key = self.key_length()
        if kv_heads is None or key is None:
            return [(0, 0)] * layers
        value = self.integer("attention.value_length") or self._head_length() or 0
        if self.integer("attention.key_length_mla"):
            # The latent of each token is kept once, and its values are a part of the keys.
            value = 0
        return [(count * key, count * value) for count in self._attending(kv_heads)]

    def key_length(self) -> int | None:
        """Values of a key of one head."""
        if (head := self._head_length()) is None:
            return None
        return self.integer("attention.key_length") or head

    def state_bytes(self) -> int:
        """Bytes of the state that a sequence has in a recurrent layer."""
        inner, state = self.integer("ssm.inner_size") or 0, self.integer("ssm.state_size") or 0
        width = self.integer("embedding_length") or 0
        if inner:
            taps = max(0, (self.integer("ssm.conv_kernel") or 1) - 1)
            groups = self.integer("ssm.group_count") or 0
            return 4 * (taps * (inner + 2 * groups * state) + inner * state)
        if head := self.integer("wkv.head_size"):
            return 4 * width * (2 + head)
        return 4 * width * max(0, (self.integer("shortconv.l_cache") or 1) - 1)

    def _head_length(self) -> int | None:
        most, width = self.largest("attention.head_count"), self.integer("embedding_length")
        return width // most if most and width is not None else None

    def _attending(self, kv_heads: list[int]) -> list[int]:
        """The K/V heads of each layer that stores K/V cells; 0 for the others."""
        every = self.integer("full_attention_interval") or _ATTENTION_INTERVAL.get(self._architecture)
        if every:
            return [count if (layer + 1) % every == 0 else 0 for layer, count in enumerate(kv_heads)]
        shared = self.integer("attention.shared_kv_layers") or 0
        layers_with_cells = max(0, _LAYERS_WITH_CELLS.get(self._architecture, len(kv_heads) - shared))
        return [count if layer < layers_with_cells else 0 for layer, count in enumerate(kv_heads)]


# Where its bytes go.


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlacement:
    """How a model is opened, as far as memory depends on it."""

    n_ctx: int = N_CTX
    slots: int = 1
    kv: KvType = F16
    n_batch: int = N_BATCH
    flash: bool = True
    gpu_layers: int = 0
    """One more than the model has: all of it."""
    cpu_experts: int = 0
    """The experts of so many layers, the first ones, stay in the machine's memory."""
    kv_offload: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes that a model takes in one place."""

    weights: int = 0
    cache: int = 0
    compute: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.compute


class WeightBytes(TypedDict):
    """Those keywords of `Sizes` that are sums of tensors."""

    layers: tuple[int, ...]
    experts: tuple[int, ...]
    embedding: int
    output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """How the names of a format's tensors say what they are of. The first group is a layer's number."""

    layer: re.Pattern[str]
    experts: re.Pattern[str]
    embedding: re.Pattern[str]

    def weigh(self, tensors: Iterable[tuple[str, int]], count: int) -> WeightBytes:
        """The bytes of tensors, each a name and a size, of a model with so many layers."""
        layers, experts = [0] * count, [0] * count
        embedding = output = 0
        for name, size in tensors:
            match = self.layer.search(name)
            if match and int(match[1]) < count:
                (experts if self.experts.search(name) else layers)[int(match[1])] += size
            elif self.embedding.search(name):
                embedding += size
            else:
                output += size
        return WeightBytes(layers=tuple(layers), experts=tuple(experts), embedding=embedding, output=output)


_GGUF = TensorNames(
    layer=re.compile(r"^blk\.(\d+)\."),
    experts=re.compile(r"^blk\.\d+\.ffn_\w+_exps"),
    embedding=re.compile(r"^token_embd"),
)
_RECURRENT = re.compile(r"^blk\.(\d+)\.(ssm_|time_mix|shortconv)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A model's sizes, layer by layer."""

    layers: tuple[int, ...]
    """Bytes of weights of each layer, experts aside."""
    experts: tuple[int, ...]
    """Bytes of the experts of each layer; 0 where it has none."""
    embedding: int = 0
    """Bytes of the table of tokens, which stays in the machine's memory."""
    output: int = 0
    """Bytes of what is computed after the last layer, that table aside."""
    tied: bool = False
    """Whether the model writes with the table it reads with: a device then has a copy of it."""
    copied: int = 0
    """Bytes of a copy of that table for the CPU: tokens are looked up in the one, and logits are computed
    with the other, which is rearranged. A table that is mapped stays in its file."""
    cache: tuple[tuple[int, int], ...]
    """Values of K and of V that a token adds to each layer."""
    states: tuple[int, ...]
    """Bytes that a sequence has in each layer, however long it is: of recurrent layers."""
    masks: int = 1
    """Kinds of attention, each with a separate mask."""
    width: int = 0
    query: int = 0
    """Values of a token's queries."""
    latent: int = 0
    """Values of a token's attention in latent space (MLA); 0 elsewhere."""
    recurrent: int = 0
    """Values of a token inside of a recurrent layer."""
    heads: int = 0
    inner: int = 0
    """Values of a token inside of the feed-forward part."""
    experts_used: int = 0
    expert_inner: int = 0
    vocabulary: int = 0
    trained: int = 0
    """Tokens of the texts that it was trained on; 0 where the file does not say."""
    offloads: bool = True
    """Whether its engine puts layers on devices with memory of their own."""

    @classmethod
    def of(cls, headers: Sequence[Header]) -> Sizes:
        """From the headers of a model's files."""
        facts = Facts(headers[0], headers[0].text("general.architecture") or "")
        memory, window = facts.memory()
        heads, width = facts.largest("attention.head_count") or 0, facts.integer("embedding_length") or 0
        tensors = [tensor for header in headers for tensor in header.tensors]
        count = facts.integer("block_count") or 0
        if not 0 <= count <= len(tensors):
            count = 0
        tied = not any(tensor.name == "output.weight" for tensor in tensors)
        tables = [tensor for tensor in tensors if _GGUF.embedding.search(tensor.name)]
        is_copied = tied and is_read(sum(tensor.size for tensor in tensors))
        recurrent = {int(match[1]) for tensor in tensors if (match := _RECURRENT.match(tensor.name))}
        state = facts.state_bytes()
        mla = facts.integer("attention.key_length_mla") is not None
        inner = facts.largest("feed_forward_length") or 0
        return cls(
            **_GGUF.weigh(((tensor.name, tensor.size) for tensor in tensors), count),
            tied=tied,
            copied=sum(each.size for each in tables if is_copied and each.type.name in _rearranged_here()),
            cache=tuple(facts.cache_widths(count) if memory.has_rows else [(0, 0)] * count),
            states=tuple(state if layer in recurrent else 0 for layer in range(count)),
            masks=2 if window else 1,
            width=width,
            query=heads * (facts.key_length() or 0),
            latent=heads * (facts.integer("attention.value_length") or 0) if mla else 0,
            recurrent=(facts.integer("ssm.inner_size") or width) if recurrent else 0,
            heads=heads,
            inner=inner,
            experts_used=facts.integer("expert_used_count") or 0,
            expert_inner=facts.integer("expert_feed_forward_length") or inner,
            vocabulary=facts.vocabulary() or 0,
            trained=facts.integer("context_length") or 0,
        )

    @property
    def weights(self) -> int:
        """Bytes of all weights, once."""
        return sum(self.layers) + sum(self.experts) + self.embedding + self.output

    @property
    def all_layers(self) -> int:
        """How many layers there are to offload: one more than the model has."""
        return len(self.layers) + 1

    def count_experts(self, wanted: int | str | None) -> int | None:
        """In how many layers experts stay in the machine's memory: "all" or a number; None where that is
        left open ("auto")."""
        if wanted in (None, "auto"):
            return None
        if not any(self.experts):
            return 0
        return len(self.layers) if wanted == "all" else min(int(wanted), len(self.layers))

    def scaled(self, weights: int) -> Sizes:
        """The same model in another quantisation, of which only the size is known."""
        ratio = weights / max(1, self.weights)

        def times(values: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(round(value * ratio) for value in values)

        return dataclasses.replace(
            self,
            layers=times(self.layers),
            experts=times(self.experts),
            embedding=round(self.embedding * ratio),
            output=round(self.output * ratio),
            copied=round(self.copied * ratio),
        )

    def layer_cache(self, placement: ModelPlacement) -> list[int]:
        """Bytes of K/V cache and of recurrent state of each layer, all slots together."""
        cells = _padded(placement.n_ctx) * placement.slots
        k_bits, v_bits = CACHE_BITS[placement.kv.k], CACHE_BITS[placement.kv.v]
        return [
            int(cells * (k * k_bits + v * v_bits) / 8) + placement.slots * state
            for (k, v), state in zip(self.cache, self.states, strict=True)
        ]

    def device(self, placement: ModelPlacement) -> Need:
        """What the devices get."""
        if placement.gpu_layers <= 0:
            return Need()
        first = self._first_offloaded(placement)
        weights = self.output + (self.embedding if self.tied else 0)
        weights += sum(self.layers[first:]) + sum(self.experts[max(first, placement.cpu_experts) :])
        cache = sum(self.layer_cache(placement)[first:]) if placement.kv_offload else 0
        return Need(weights=weights, cache=cache, compute=self.compute(placement))

    def machine(self, placement: ModelPlacement) -> Need:
        """What the machine's own memory gets."""
        first = self._first_offloaded(placement)
        experts = self.experts[: max(first, placement.cpu_experts)]
        weights = self.embedding + sum(self.layers[:first]) + sum(experts)
        cache = self.layer_cache(placement)
        compute = self.compute(placement)
        rows = 4 * placement.slots * self.vocabulary
        if placement.gpu_layers <= 0:
            weights += self.output + self.copied
            return Need(weights=weights, cache=sum(cache), compute=compute + rows)
        if not first and not placement.cpu_experts and placement.kv_offload:
            # It computes nothing: it only looks tokens up.
            compute = self._mask(placement) + 4 * placement.n_batch * self.width
        here = cache[:first] if placement.kv_offload else cache
        return Need(weights=weights, cache=sum(here), compute=rows + compute)

    def compute(self, placement: ModelPlacement) -> int:
        """Buffers of a step: those of a layer, or those of the rows of logits after the last one."""
        n_batch = max(min(placement.n_batch, placement.n_ctx), placement.slots)
        rows = max(min(ROWS, n_batch), placement.slots)
        attention = 2 * self.query + self.latent + 4 * self.width
        recurrent = 5 * self.recurrent + 3 * self.width
        if self.experts_used and any(self.experts):
            gathered = self.experts_used * self.width
            inside = self.experts_used * self.expert_inner
            forward = max(3 * inside + 5 * self.width, 2 * gathered + 2 * inside)
        else:
            forward = 3 * self.inner + 4 * self.width
        layer = 4 * n_batch * max(attention, recurrent, forward)
        if not placement.flash:
            scores = 4 * n_batch * placement.n_ctx * self.heads
            layer = max(layer, scores + 4 * n_batch * int(3.5 * self.query + 1.5 * self.width))
        logits = 4 * rows * self.vocabulary + 8 * (n_batch + rows) * self.width
        return max(layer + self._mask(placement), logits)

    def _mask(self, placement: ModelPlacement) -> int:
        if not any(k for k, _ in self.cache):
            return 0
        n_batch = max(min(placement.n_batch, placement.n_ctx), placement.slots)
        return self.masks * _padded(placement.n_ctx) * n_batch * (2 if placement.flash else 4)

    def _first_offloaded(self, placement: ModelPlacement) -> int:
        """The first layer on a device; as many as there are where none is."""
        return min(len(self.layers), max(0, self.all_layers - max(0, placement.gpu_layers)))


def _padded(n_ctx: int) -> int:
    return -(-n_ctx // CELLS) * CELLS
