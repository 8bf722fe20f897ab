"""What a model takes in memory, from the headers of its files alone, and how to open it in what is free.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypedDict

from perdure import system
from perdure.config import N_CTX, SLOTS
from perdure.models.card import Facts, card_of
from perdure.models.header import Header

FitLevel: TypeAlias = Literal["fits", "tight", "not"]

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
"""Bits of a value of K and V, by type."""
N_BATCH = 512
"""Tokens of a step, at most."""
ROWS = 64
"""Rows of logits a step can give: the engine reserves memory for as many."""
SPARE = 0.1
"""Of what is free, this share is left to others; a model that needs some of it is `tight`."""
_PAD = 256
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
_LAYER = re.compile(r"blk\.(\d+)\.")
_EXPERTS = re.compile(r"blk\.\d+\.ffn_\w+_exps")
_RECURRENT = re.compile(r"blk\.\d+\.(ssm_|time_mix|shortconv)")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How a model is to be opened, as far as memory depends on it."""

    n_ctx: int = N_CTX
    slots: int = 1
    k_type: str = "f16"
    v_type: str = "f16"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A model's sizes, layer by layer."""

    layers: tuple[int, ...]
    """Bytes of weights of each layer, experts aside."""
    experts: tuple[int, ...]
    """Bytes of the experts of each layer; 0 where it has none."""
    embedding: int
    """Bytes of the table of tokens, which stays in the machine's memory."""
    output: int
    """Bytes of what is computed after the last layer, that table aside."""
    tied: bool
    """Whether the model writes with the table it reads with: a device then has a copy of it."""
    copied: int = 0
    """Bytes of a copy of that table for the CPU: tokens are looked up in the one, and logits are computed
    with the other, which is rearranged. A table that is mapped stays in its file."""
    cache: tuple[tuple[int, int], ...]
    """Values of K and of V that a token adds to each layer."""
    states: tuple[int, ...]
    """Bytes that a sequence has in each layer, however long it is: of recurrent layers."""
    masks: int
    """Kinds of attention, each with a mask of its own."""
    width: int
    query: int
    """Values of a token's queries."""
    latent: int
    """Values of a token's attention in latent space (MLA); 0 elsewhere."""
    recurrent: int
    """Values of a token inside of a recurrent layer."""
    heads: int
    inner: int
    """Values of a token inside of the feed-forward part."""
    experts_used: int
    expert_inner: int
    vocabulary: int
    trained: int
    """Tokens of the texts that it was trained on; 0 where the file does not say."""

    @classmethod
    def of(cls, headers: Sequence[Header]) -> Sizes:
        """From the headers of a model's files."""
        card = card_of(headers)
        facts = Facts(headers[0], card.architecture or "")
        count = card.layers or 0
        if not 0 <= count <= sum(len(header.tensors) for header in headers):
            count = 0
        layers, experts, recurrent = [0] * count, [0] * count, [False] * count
        embedding = output = copied = 0
        tensors = [tensor for header in headers for tensor in header.tensors]
        tied = not any(tensor.name == "output.weight" for tensor in tensors)
        read = tied and is_read(sum(tensor.size for tensor in tensors))
        for tensor in tensors:
            match = _LAYER.match(tensor.name)
            if match and int(match[1]) < count:
                at = int(match[1])
                (experts if _EXPERTS.match(tensor.name) else layers)[at] += tensor.size
                recurrent[at] |= _RECURRENT.match(tensor.name) is not None
            elif tensor.name.startswith("token_embd"):
                embedding += tensor.size
                copied += tensor.size if read and tensor.type.name in _rearranged_here() else 0
            else:
                output += tensor.size
        state = facts.state_bytes()
        mla = facts.integer("attention.key_length_mla") is not None
        return cls(
            layers=tuple(layers),
            experts=tuple(experts),
            embedding=embedding,
            output=output,
            tied=tied,
            copied=copied,
            cache=tuple(facts.cache_widths(count) if card.memory.has_rows else [(0, 0)] * count),
            states=tuple(state if each else 0 for each in recurrent),
            masks=2 if card.window else 1,
            width=card.embedding_length or 0,
            query=(card.heads or 0) * (facts.key_length() or 0),
            latent=(card.heads or 0) * (facts.integer("attention.value_length") or 0) if mla else 0,
            recurrent=(facts.integer("ssm.inner_size") or card.embedding_length or 0)
            if any(recurrent)
            else 0,
            heads=card.heads or 0,
            inner=facts.largest("feed_forward_length") or 0,
            experts_used=facts.integer("expert_used_count") or 0,
            expert_inner=facts.integer("expert_feed_forward_length")
            or facts.largest("feed_forward_length")
            or 0,
            vocabulary=card.vocabulary or 0,
            trained=card.context_length or 0,
        )

    @property
    def weights(self) -> int:
        """Bytes of all weights, once."""
        return sum(self.layers) + sum(self.experts) + self.embedding + self.output

    @property
    def all_layers(self) -> int:
        """How many layers there are to offload: one more than the model has."""
        return len(self.layers) + 1

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

    def layer_cache(self, setup: Setup) -> list[int]:
        """Bytes of K/V cache and of recurrent state of each layer, all slots together."""
        cells = -(-setup.n_ctx // _PAD) * _PAD * setup.slots
        k_bits, v_bits = CACHE_BITS[setup.k_type], CACHE_BITS[setup.v_type]
        return [
            int(cells * (k * k_bits + v * v_bits) / 8) + setup.slots * state
            for (k, v), state in zip(self.cache, self.states, strict=True)
        ]

    def device(self, setup: Setup) -> Need:
        """What the devices get."""
        count = min(setup.gpu_layers, self.all_layers)
        if count <= 0:
            return Need()
        first = max(0, len(self.layers) + 1 - count)
        weights = self.output + (self.embedding if self.tied else 0)
        weights += sum(self.layers[first:]) + sum(self.experts[max(first, setup.cpu_experts) :])
        cache = sum(self.layer_cache(setup)[first:]) if setup.kv_offload else 0
        return Need(weights=weights, cache=cache, compute=self.compute(setup))

    def machine(self, setup: Setup) -> Need:
        """What the machine's own memory gets."""
        count = min(max(0, setup.gpu_layers), self.all_layers)
        first = max(0, len(self.layers) + 1 - count)
        weights = (
            self.embedding + sum(self.layers[:first]) + sum(self.experts[: max(first, setup.cpu_experts)])
        )
        cache = self.layer_cache(setup)
        rows = 4 * setup.slots * self.vocabulary
        if not count:
            return Need(
                weights=weights + self.output + self.copied,
                cache=sum(cache),
                compute=self.compute(setup) + rows,
            )
        inputs = self._mask(setup) + 4 * setup.n_batch * self.width
        here = first > 0 or setup.cpu_experts > 0 or not setup.kv_offload
        return Need(
            weights=weights,
            cache=sum(cache[:first] if setup.kv_offload else cache),
            compute=rows + (self.compute(setup) if here else inputs),
        )

    def compute(self, setup: Setup) -> int:
        """Buffers of a step: those of a layer, or those of the rows of logits after the last one."""
        n_batch = max(min(setup.n_batch, setup.n_ctx), setup.slots)
        rows = max(min(ROWS, n_batch), setup.slots)
        attention = 2 * self.query + self.latent + 4 * self.width
        recurrent = 5 * self.recurrent + 3 * self.width
        if self.experts_used and any(self.experts):
            gathered = self.experts_used * self.width
            inside = self.experts_used * self.expert_inner
            forward = max(3 * inside + 5 * self.width, 2 * gathered + 2 * inside)
        else:
            forward = 3 * self.inner + 4 * self.width
        layer = 4 * n_batch * max(attention, recurrent, forward)
        if not setup.flash:
            scores = 4 * n_batch * setup.n_ctx * self.heads
            layer = max(layer, scores + 4 * n_batch * int(3.5 * self.query + 1.5 * self.width))
        logits = 4 * rows * self.vocabulary + 8 * (n_batch + rows) * self.width
        return max(layer + self._mask(setup), logits)

    def _mask(self, setup: Setup) -> int:
        if not any(k for k, _ in self.cache):
            return 0
        cells = -(-setup.n_ctx // _PAD) * _PAD
        n_batch = max(min(setup.n_batch, setup.n_ctx), setup.slots)
        return self.masks * cells * n_batch * (2 if setup.flash else 4)


MARGIN = 256 << 20
"""Bytes of a device that its driver and the engine's own tables take."""
LEAST_CONTEXT = 4096
"""Tokens of a request that a proposal has, at least, where the model was trained for as many."""
SLOT_CHOICES = (4, 2, 1)
"""Requests at once: as many of these as fit."""
TYPE_CHOICES = ("f16", "q8_0")
"""K/V types of a proposal: the second where the first leaves too little context."""
_CACHE_SHARE = 0.5
"""Of the machine's free memory, for a K/V cache whose size nobody chose: to go through more at every token
would take longer than anybody waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bytes that are free: in the machine's own memory, and on the devices that layers go to."""

    machine: int
    device: int = 0
    """Of all devices together."""
    devices: int = 1

    def device_bytes(self, sizes: Sizes, setup: Setup) -> int:
        """What the devices need in all: buffers of a step, and what the driver takes, on each of them."""
        need = sizes.device(setup)
        if not need.total:
            return 0
        return need.total + (self.devices - 1) * need.compute + self.devices * MARGIN

    def holds(self, sizes: Sizes, setup: Setup) -> bool:
        if self.device_bytes(sizes, setup) > self.device:
            return False
        return sizes.machine(setup).total <= self.machine

    def most_layers(self, sizes: Sizes, setup: Setup) -> int:
        """The most layers that fit on the devices."""
        for count in range(sizes.all_layers, 0, -1):
            if self.device_bytes(sizes, dataclasses.replace(setup, gpu_layers=count)) <= self.device:
                return count
        return 0

    def fewest_cpu_experts(self, sizes: Sizes, setup: Setup) -> int | None:
        """The fewest layers whose experts must stay in the machine's memory so that the rest fits on the
        devices; None where that is not enough."""
        for count in range(len(sizes.experts) + 1):
            if self.device_bytes(sizes, dataclasses.replace(setup, cpu_experts=count)) <= self.device:
                return count
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FitConstraints:
    """What somebody chose; None is for `propose` to choose."""

    n_ctx: int | None = None
    slots: int | None = None
    k_type: str | None = None
    v_type: str | None = None
    gpu_layers: int | None = None
    cpu_experts: int | None = None
    kv_offload: bool = True
    n_batch: int = N_BATCH
    flash: bool = True

    @classmethod
    def of(
        cls, settings: Mapping[str, Any], *, gpu_layers: int | None, cpu_experts: int | None = None
    ) -> FitConstraints:
        """What a context is opened with, and where its model is placed."""
        n_ctx, slots = settings.get("n_ctx", N_CTX), settings.get("slots", SLOTS)
        return cls(
            n_ctx=None if n_ctx == "auto" else n_ctx,
            slots=None if slots == "auto" else slots,
            k_type=settings.get("k_type", "f16"),
            v_type=settings.get("v_type", "f16"),
            gpu_layers=gpu_layers,
            cpu_experts=cpu_experts,
        )


class FitOptions(TypedDict):
    """What a proposal chose, as keywords of `perdure.open`."""

    n_ctx: int
    slots: int
    k_type: str
    v_type: str
    gpu_layers: int
    cpu_experts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How a model can be opened here, and what that takes."""

    name: str
    verdict: FitLevel
    """`fits`; `tight`: with less than was wished, or nearly all that is free; `not`: not at all."""
    setup: Setup
    machine: Need
    """Of the machine's own memory."""
    device: Need
    """Of the devices' memory."""
    room: Room
    weights: int
    reasons: tuple[str, ...]
    """Why it was proposed so, a sentence each."""

    @property
    def options(self) -> FitOptions:
        """As keywords of `perdure.open`."""
        setup = self.setup
        return {
            "n_ctx": setup.n_ctx,
            "slots": setup.slots,
            "k_type": setup.k_type,
            "v_type": setup.v_type,
            "gpu_layers": setup.gpu_layers,
            "cpu_experts": setup.cpu_experts,
        }


def largest_context(sizes: Sizes, setup: Setup, room: Room, *, least: int = 1) -> int:
    """The most tokens of a request, in steps of 256, up to those that the model was trained for; 0 where not
    even `least` fit."""
    most = max(least, sizes.trained or 8 * LEAST_CONTEXT)
    if not room.holds(sizes, dataclasses.replace(setup, n_ctx=least)):
        return 0
    share = dataclasses.replace(room, machine=int(room.machine * (1 - SPARE)))

    def fits(n_ctx: int) -> bool:
        tried = dataclasses.replace(setup, n_ctx=n_ctx)
        cache = sizes.machine(tried).cache
        return cache <= _CACHE_SHARE * room.machine and share.holds(sizes, tried)

    if fits(most):
        return most
    low, high = 0, most // _PAD
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * _PAD) else (low, middle)
    return max(least, low * _PAD)


def propose(name: str, sizes: Sizes, room: Room, constraints: FitConstraints | None = None) -> Fit:
    """The best way to open a model in `room`: the first of a list, from the best to the least, that fits."""
    constraints = constraints or FitConstraints()
    least = constraints.n_ctx or min(LEAST_CONTEXT, sizes.trained or LEAST_CONTEXT)
    best = smallest = None
    for setup in _setups(sizes, room, constraints, least):
        best = best or setup
        smallest = setup
        if room.holds(sizes, setup):
            n_ctx = constraints.n_ctx or largest_context(sizes, setup, room, least=least)
            setup = dataclasses.replace(setup, n_ctx=n_ctx)
            reasons = _reasons(sizes, setup, best, room, constraints)
            return _fit(name, sizes, setup, room, _verdict(sizes, setup, best, room, constraints), reasons)
    assert smallest is not None
    device, machine = room.device_bytes(sizes, smallest), sizes.machine(smallest).total
    reason = (
        f"with {smallest.n_ctx:,} tokens for {smallest.slots} request(s) it takes at least "
        f"{_gib(machine)} of memory, {_gib(room.machine)} are free"
    )
    if device:
        reason += f", and {_gib(device)} of the GPU's, {_gib(room.device)} are free"
    return _fit(name, sizes, smallest, room, "not", (reason,))


def _setups(sizes: Sizes, room: Room, constraints: FitConstraints, least: int) -> Iterator[Setup]:
    """Ways to open a model, the best one first, with the least context each."""
    slots = SLOT_CHOICES if constraints.slots is None else (constraints.slots,)
    types: tuple[tuple[str, str], ...]
    if constraints.k_type is None and constraints.v_type is None:
        types = tuple((each, each) for each in (TYPE_CHOICES if constraints.flash else TYPE_CHOICES[:1]))
    else:
        types = ((constraints.k_type or "f16", constraints.v_type or "f16"),)
    base = Setup(
        n_ctx=least, kv_offload=constraints.kv_offload, n_batch=constraints.n_batch, flash=constraints.flash
    )

    def ways(layers: int, experts: int) -> Iterator[Setup]:
        for k_type, v_type in types:
            for count in slots:
                yield dataclasses.replace(
                    base, slots=count, k_type=k_type, v_type=v_type, gpu_layers=layers, cpu_experts=experts
                )

    if not room.device or constraints.gpu_layers == 0:
        yield from ways(0, constraints.cpu_experts or 0)
        return
    layers = (
        sizes.all_layers if constraints.gpu_layers is None else min(constraints.gpu_layers, sizes.all_layers)
    )
    yield from ways(layers, constraints.cpu_experts or 0)
    for setup in ways(layers, 0):
        if constraints.cpu_experts is None and any(sizes.experts):
            experts = room.fewest_cpu_experts(sizes, setup)
            if experts is not None:
                yield dataclasses.replace(setup, cpu_experts=experts)
    if constraints.gpu_layers is None:
        experts = (len(sizes.experts) if any(sizes.experts) else 0) if constraints.cpu_experts is None else 0
        for setup in ways(0, constraints.cpu_experts or experts):
            yield dataclasses.replace(setup, gpu_layers=room.most_layers(sizes, setup))


def _verdict(sizes: Sizes, setup: Setup, best: Setup, room: Room, constraints: FitConstraints) -> FitLevel:
    if setup.gpu_layers < best.gpu_layers or setup.cpu_experts > best.cpu_experts:
        return "tight"
    if setup.k_type != best.k_type or (setup.slots == 1 and best.slots > 1):
        return "tight"
    machine = judge(sizes.machine(setup).total, room.machine)
    device = judge(room.device_bytes(sizes, setup), room.device) if setup.gpu_layers else "fits"
    if "tight" in (machine, device) and constraints.n_ctx is None:
        # What is left was filled with context, which can be given up.
        least = dataclasses.replace(setup, n_ctx=min(setup.n_ctx, LEAST_CONTEXT))
        machine = judge(sizes.machine(least).total, room.machine)
        device = judge(room.device_bytes(sizes, least), room.device) if setup.gpu_layers else "fits"
    return "tight" if "tight" in (machine, device) else "fits"


def _reasons(
    sizes: Sizes, setup: Setup, best: Setup, room: Room, constraints: FitConstraints
) -> tuple[str, ...]:
    reasons = []
    if setup.gpu_layers and setup.gpu_layers >= sizes.all_layers and not setup.cpu_experts:
        reasons.append(f"all of it fits on the GPU, of which {_gib(room.device)} are free")
    elif setup.cpu_experts:
        reasons.append(
            f"the experts of {min(setup.cpu_experts, len(sizes.experts))} of {len(sizes.experts)} layers "
            f"stay in memory and are computed by the CPU: with them it would take "
            f"{_gib(room.device_bytes(sizes, dataclasses.replace(setup, cpu_experts=0)))} of the GPU's "
            f"{_gib(room.device)}"
        )
    if 0 < setup.gpu_layers < sizes.all_layers:
        reasons.append(
            f"{setup.gpu_layers} of {sizes.all_layers} layers fit on the GPU, of which {_gib(room.device)} "
            "are free; the CPU computes the others"
        )
    elif not setup.gpu_layers and room.device and constraints.gpu_layers is None:
        reasons.append(f"no layer fits on the GPU, of which {_gib(room.device)} are free")
    if constraints.n_ctx is None:
        trained = f"the model was trained for {sizes.trained:,}"
        reasons.append(
            f"{setup.n_ctx:,} tokens a request: "
            + (trained if setup.n_ctx >= sizes.trained else f"more do not fit; {trained}")
        )
    if constraints.slots is None and setup.slots < best.slots:
        reasons.append(
            f"{setup.slots} request(s) at once: {best.slots} do not fit with {best.n_ctx:,} tokens"
        )
    if setup.k_type != best.k_type:
        reasons.append(f"K/V in {setup.k_type}: in {best.k_type} it does not fit")
    return tuple(reasons)


def _fit(
    name: str, sizes: Sizes, setup: Setup, room: Room, verdict: FitLevel, reasons: tuple[str, ...]
) -> Fit:
    return Fit(
        name=name,
        verdict=verdict,
        setup=setup,
        machine=sizes.machine(setup),
        device=sizes.device(setup),
        room=room,
        weights=sizes.weights,
        reasons=reasons,
    )


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
