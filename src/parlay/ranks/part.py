"""A rank's part of the model: its connections to other ranks, and the forward of its layers, heads and units."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from parlay.models.choosing import choose_forward
from parlay.models.compiled.forward import CompiledForward
from parlay.models.compiled.weights import Packed
from parlay.models.config import DecoderConfig
from parlay.models.forward import Forward
from parlay.models.part import Part
from parlay.models.weights.fused import Operand
from parlay.models.weights.parts import Spans, adapter_part, divide, share, stage
from parlay.options.ranks import MOST_RANKS
from parlay.ranks.devices import DeviceGroup, device_group
from parlay.ranks.groups import SharedGroup, SocketGroup
from parlay.ranks.layout import Layout, Plan
from parlay.ranks.stages import Stage, StageForward
from parlay.ranks.wire import Connection, Door, Kind, connect
from parlay.types import RunnerLost

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RankPart:
    """A rank's part of a model, and the ranks that it works with. It is a `MakeForward`.

    ``group``: the ranks that have the other shares of the same layers; it sums their outputs. ``context``: the ranks
    that have the other keys and values of the texts.
    """

    rank: int
    layout: Layout
    group: SharedGroup | SocketGroup | DeviceGroup | None = None
    context: SharedGroup | SocketGroup | None = None
    peers: Mapping[int, Connection] = field(default_factory=dict)

    def give_up(self) -> None:
        """Make all waits for other ranks fail now. Any thread may call this."""
        for group in (self.group, self.context):
            if group is not None:
                group.give_up()
        for connection in self.peers.values():
            connection.close()

    def __call__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Operand],
        dtype: torch.dtype,
        device: torch.device,
        *,
        packed: Packed,
        cached: str,
    ) -> tuple[Forward, str]:
        """Make this part's forward. Raises UnsupportedModel if it can't be made; see `choose_forward`."""
        layout, sizes, own = self.layout, config, dict(weights)
        layers = divide(config.num_layers, layout.stages)
        mine = layers[layout.stage(self.rank)]
        if layout.stages > 1:
            sizes, own = stage(sizes, own, mine)
        spans = None
        if layout.tensor > 1:
            spans = Spans.of(sizes, own, layout.share(self.rank), layout.tensor)
            sizes, own = share(sizes, own, layout.share(self.rank), layout.tensor)
        part = Part(
            self.group,
            logits=self.rank == 0,
            states=layout.stages > 1,
            context=self.context,
            spread=layout.spread(self.rank),
            cut=lambda adapter: replace(adapter, matrices=adapter_part(adapter.matrices, mine, spans)),
        )
        forward, reason = choose_forward(sizes, own, dtype, device, packed=packed, cached=cached, part=part)
        if layout.tensor > 1:  # sums of parts round differently, so the kernels' line says this
            reason = f"{reason}; {layout.tensor} ranks share each layer"
        if layout.stages == 1:
            return forward, reason
        assert isinstance(forward, CompiledForward), "others refuse a part that is a stage"
        vocab = config.output_size if self.rank == 0 else 0
        placed = self._stage(mine, config.num_layers, len(layers[0]))
        return StageForward(forward, placed, config.hidden_size, vocab, dtype), reason

    def _stage(self, layers: range, count: int, first: int) -> Stage:
        """Return the stage with these layers, and the connections to its neighbours."""
        last = self.layout.ranks - self.layout.together
        back = {0: last, last: 0}.get(self.rank, -1)
        after = self.rank + self.layout.together if layers.stop < count else -1
        before = self.rank - self.layout.together if layers.start else -1
        peers, stages = self.peers, self.layout.stages
        return Stage(stages, layers, count, first, peers.get(before), peers.get(after), peers.get(back))


def _never() -> None:
    """Do nothing: the default check, which never raises."""


def join_group(
    plan: Plan,
    door: Door,
    leader: tuple[str, int] | None,
    check: Callable[[], None] = _never,
) -> RankPart:
    """Connect the plan's rank to the ranks with which it exchanges rows. ``leader`` is rank 0's address, or None.

    Each rank connects to the ranks before it, then waits for the ranks after it. Raises RunnerLost, and what ``check``
    raises if a rank is lost meanwhile.
    """
    rank, layout = plan.rank, plan.layout
    connections: dict[int, Connection] = {}
    groups = layout.groups(rank)
    over_sockets = [members for members, file in zip(groups, plan.memory, strict=True) if len(members) > 1 and not file]
    wanted = layout.peers(rank, over_sockets)
    for peer in [each for each in wanted if each < rank]:
        where = leader if peer == 0 and leader is not None else (plan.hosts[peer], plan.ports[peer])
        connections[peer] = connect(where, door.secret, peer, plan.seconds)
        connections[peer].send(Kind.HELLO, str(rank).encode())
    later = {each for each in wanted if each > rank}
    until = time.monotonic() + plan.seconds
    while later:
        check()
        joined = door.admit(min(until, time.monotonic() + 1))
        if joined is None:
            if time.monotonic() > until:
                raise RunnerLost(f"not all ranks have found each other within {plan.seconds:g} s")
            continue
        joined.rank = _named(joined)
        if joined.rank in later:
            connections[joined.rank] = joined
            later.discard(joined.rank)
        else:  # not expected, or already ended: the expected rank may still come
            _log.warning("a rank joined after all ranks were there, and was refused")
            joined.send_away("all ranks of the model are there")
    (sums, texts), (added, gathered) = groups, plan.memory
    device = torch.device(plan.device)
    group: SharedGroup | SocketGroup | DeviceGroup | None
    if device.type == "cuda" and layout.tensor > 1:
        group = device_group(connections, sums, sums.index(rank), device, seconds=plan.seconds)
    else:
        group = _host_group(plan, sums, added, connections)
    return RankPart(rank, layout, group, _host_group(plan, texts, gathered, connections), connections)


def _named(joined: Connection) -> int:
    """Return the rank's number from its greeting; -1 if it sends no number."""
    try:
        greeting = joined.expect(Kind.HELLO)
    except RunnerLost:
        return -1
    return int(greeting) if greeting.isdigit() and len(greeting) <= len(str(MOST_RANKS)) else -1


def _host_group(
    plan: Plan, members: Sequence[int], file: str, connections: Mapping[int, Connection]
) -> SharedGroup | SocketGroup | None:
    """Make the group with these members, over a shared file or over connections; None if the rank is alone."""
    if len(members) == 1:
        return None
    if file:
        return SharedGroup(Path(file), members, members.index(plan.rank), plan.seconds)
    return SocketGroup(connections, members, members.index(plan.rank))
