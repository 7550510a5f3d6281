"""Which rank runs which part of a model, and the messages by which ranks agree on it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import TypeVar

import torch

from parlay import __version__
from parlay.cache import Spread
from parlay.cache.pages import SPAN, STRIP
from parlay.compiled.build import digest
from parlay.compiled.library import NotLoaded, load
from parlay.models.config import DecoderConfig
from parlay.options import LoadOptions
from parlay.types import ParlayError, RunnerLost


@dataclass(frozen=True, slots=True)
class Layout:
    """The division of a model among ranks. ``tensor`` ranks share each layer. ``stages`` groups of such ranks have some
    of the layers each; rank 0 is in the first group.

    Alternatively, ``context`` groups have all layers, and each holds a part of every text's keys and values: the groups
    take ``span`` tokens in turn. Ranks are numbered through the shares of the first group, then of the next, and so on.
    """

    tensor: int = 1
    stages: int = 1
    context: int = 1
    span: int = SPAN

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.together * self.stages

    @property
    def together(self) -> int:
        """How many ranks exchange numbers within each layer."""
        return self.tensor * self.context

    def stage(self, rank: int) -> int:
        """Return the number of the stage whose layers a rank has."""
        return rank // self.together

    def share(self, rank: int) -> int:
        """Return the number of a rank's share of its stage's layers."""
        return rank % self.tensor

    def spread(self, rank: int) -> Spread:
        """Return which pages of each text a rank has."""
        return Spread(rank % self.together // self.tensor, self.context, self.span)

    def groups(self, rank: int) -> tuple[range, range]:
        """Return two groups of ranks: with the other shares of the same layers and texts, and with the same share of
        the other parts of the texts.

        Both groups are in order, and include the rank itself. A group of one exchanges nothing.
        """
        first, stage = rank - self.share(rank), self.stage(rank) * self.together
        others = range(stage + self.share(rank), stage + self.together, self.tensor)
        return range(first, first + self.tensor), others

    def peers(self, rank: int, over_sockets: Iterable[range] = ()) -> list[int]:
        """Return the ranks to which a rank needs connections: its neighbouring stages, and its groups in
        ``over_sockets``."""
        found = {rank - self.together, rank + self.together} if self.stages > 1 else set()
        last = self.ranks - self.together
        found |= {last} if rank == 0 and self.stages > 1 else {0} if rank == last and rank else set()
        found.update(*over_sockets)
        return sorted((found - {rank}) & set(range(self.ranks)))

    def check(self, name: str, config: DecoderConfig) -> None:
        """Raise ParlayError for more ranks than the model has key heads or layers, and for layers that can't be
        divided."""
        if config.is_uneven:
            raise ParlayError(
                f"{name}: layers of {config.architecture} differ in their heads or see other layers' keys, so they "
                "can't be shared out among ranks; run it on one"
            )
        if config.ngrams is not None:
            raise ParlayError(f"{name}: a model that reads a table of n-grams runs in one process; run it on one rank")
        if config.ngram_layers is not None:
            raise ParlayError(f"{name}: its first layers are looked up, which one process does; run it on one rank")
        if config.shallow is not None:
            raise ParlayError(f"{name}: rows run through different layers, which one process does; run it on one rank")
        if self.tensor > config.num_kv_heads:
            raise ParlayError(
                f"tensor_parallel={self.tensor}: {name} has {config.num_kv_heads} key heads to share out; give a "
                "number up to that",
                "tensor_parallel",
            )
        if self.tensor > 1 and any(form.wide_qk_norm for form in config.forms):
            raise ParlayError(
                f"tensor_parallel={self.tensor}: layers of {name} have norms of all heads together, and can't be "
                "shared out; give pipeline_parallel instead",
                "tensor_parallel",
                "pipeline_parallel",
            )
        mixtures = [form.experts for form in config.forms if form.experts is not None]
        least = min([size for each in mixtures for size in (each.size, each.shared) if size], default=0)
        if mixtures and least < 2 * self.tensor:
            raise ParlayError(
                f"tensor_parallel={self.tensor}: experts of {name} have {least} units to share out; give a number up "
                f"to {least // 2}",
                "tensor_parallel",
            )
        if self.stages > config.num_layers:
            raise ParlayError(
                f"pipeline_parallel={self.stages}: {name} has {config.num_layers} layers; give a number up to that",
                "pipeline_parallel",
            )


def core_name() -> str | None:
    """Return the instruction set of the compiled decoder; None if there is no compiled decoder."""
    try:
        name: bytes = load().name
    except NotLoaded:
        return None
    return name.decode()


def build_name() -> str:
    """Describe all that may change a result: versions, and the instruction set of the compiled decoder."""
    core = core_name() or "no compiled decoder"
    return f"parlay {__version__}, sources {digest()}, {core}, torch {torch.__version__}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A joining rank's message: its build, the address at which it listens for other ranks, and its machine."""

    build: str
    host: str
    port: int
    machine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Rank 0's request to a joining rank: it must have this model's files, with this SHA-256.

    All ranks wait ``seconds`` for each other.
    """

    model: str
    digest: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Rank 0's orders to the rank ``rank``: the model, how to load it, and the ranks that it works with.

    ``hosts`` and ``ports`` are the addresses of all ranks; the other ranks have joined at rank 0's. ``memory``: the
    shared files of the rank's two groups; a group with an empty name exchanges over sockets or on GPUs. Every rank
    merges the adapter in the folder ``lora`` into its part; ``adapter`` is its SHA-256, or empty if there is no
    adapter. The other fields are the same as in LoadOptions.
    """

    rank: int
    tensor: int
    stages: int
    context: int
    span: int
    model: str
    digest: str
    hosts: list[str]
    ports: list[int]
    memory: list[str]
    seconds: float
    dtype: str
    device: str
    quantize: str | None
    kv_cache_dtype: str
    threads: int | None
    lora: str | None
    adapter: str

    @property
    def layout(self) -> Layout:
        return Layout(self.tensor, self.stages, self.context, self.span)

    @property
    def load(self) -> LoadOptions:
        """The options with which this rank loads its part."""
        return LoadOptions(
            dtype=self.dtype,
            device=self.device,
            quantize=self.quantize,
            kv_cache_dtype=self.kv_cache_dtype,
            threads=self.threads,
            lora=self.lora,
        )

    def with_threads(self, threads: int | None) -> Plan:
        """Return the plan with this number of threads, or unchanged for None."""
        return self if threads is None else replace(self, threads=threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOrder:
    """Rank 0's order to read the adapter in a folder, with this ``salt``, under this ``number``."""

    number: int
    name: str
    folder: str
    salt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterAnswer:
    """The answer to an `AdapterOrder`: why the rank could not read the adapter; empty if it has."""

    number: int
    reason: str


T = TypeVar("T", Hello, Wanted, Plan, AdapterOrder, AdapterAnswer)


def encode(message: Hello | Wanted | Plan | AdapterOrder | AdapterAnswer) -> bytes:
    """Encode a message as JSON."""
    return json.dumps(asdict(message)).encode()


def decode_hello(content: bytes | bytearray) -> Hello:
    """Decode a message. Raises RunnerLost if it is invalid."""
    return _decode(Hello, content)


def decode_wanted(content: bytes | bytearray) -> Wanted:
    """Decode a message. Raises RunnerLost if it is invalid."""
    return _decode(Wanted, content)


def decode_adapter_order(content: bytes | bytearray) -> AdapterOrder:
    """Decode a message. Raises RunnerLost if it is invalid."""
    return _decode(AdapterOrder, content)


def decode_adapter_answer(content: bytes | bytearray) -> AdapterAnswer:
    """Decode a message. Raises RunnerLost if it is invalid."""
    return _decode(AdapterAnswer, content)


def decode_plan(content: bytes | bytearray) -> Plan:
    """Decode a plan. Raises RunnerLost if it is invalid."""
    plan = _decode(Plan, content)
    known = 0 < plan.rank < plan.layout.ranks == len(plan.hosts) == len(plan.ports)
    if not known or len(plan.memory) != 2 or plan.span < STRIP or plan.span % STRIP:
        raise RunnerLost("rank 0 sent a plan that is invalid: are the versions the same?")
    return plan


def _decode(kind: type[T], content: bytes | bytearray) -> T:
    try:
        values = json.loads(content)
    except ValueError:
        values = None
    declared = {field.name: str(field.type) for field in fields(kind)}
    if not isinstance(values, dict) or values.keys() != declared.keys():
        raise RunnerLost("what a rank said of itself can't be read: are the versions the same?")
    if not all(_fits(values[name], type_) for name, type_ in declared.items()):
        raise RunnerLost("what a rank said of itself is invalid: are the versions the same?")
    return kind(**values)


def _fits(value: object, declared: str) -> bool:
    """Whether a value has the type that an annotation names."""
    base = declared.removesuffix(" | None")
    if value is None:
        return base != declared
    if base.startswith("list["):
        return isinstance(value, list) and all(_fits(each, base[5:-1]) for each in value)
    return type(value) in {"int": (int,), "str": (str,), "float": (int, float)}[base]
