"""A rank's own part of the model: its connections to others, and the forward that runs its layers, heads and units."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from parlay.models.choosing import choose_forward
from parlay.models.compiled.forward import CompiledForward
from parlay.models.compiled.weights import Packed
from parlay.models.config import DecoderConfig
from parlay.models.forward import Forward, Part
from parlay.models.weights.fused import Operand
from parlay.models.weights.parts import divide, share, stage
from parlay.ranks.groups import SharedGroup, SocketGroup
from parlay.ranks.layout import Layout, Plan
from parlay.ranks.stages import Stage, StageForward
from parlay.ranks.wire import Connection, Kind, WrongSecret, admit, connect
from parlay.types import RunnerLost

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RankPart:
    """Which part of a model a rank runs, and with whom; a `MakeForward`."""

    rank: int
    layout: Layout
    group: SharedGroup | SocketGroup | None = None
    peers: Mapping[int, Connection] = field(default_factory=dict)

    def give_up(self) -> None:
        """Let no forward wait for another rank any more. Any thread may call it."""
        if self.group is not None:
            self.group.give_up()
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
        """Make the forward of this part. Raises UnsupportedModel where it can't be had; see `choose_forward`."""
        layout, sizes, own = self.layout, config, dict(weights)
        layers = divide(config.num_layers, layout.stages)
        mine = layers[layout.stage(self.rank)]
        if layout.stages > 1:
            sizes, own = stage(sizes, own, mine)
        if layout.tensor > 1:
            sizes, own = share(sizes, own, layout.share(self.rank), layout.tensor)
        spreads = layout.context > 1
        part = Part(
            None if spreads else self.group,
            logits=self.rank == 0,
            states=layout.stages > 1,
            context=self.group if spreads else None,
            spread=layout.spread(self.rank),
        )
        forward, reason = choose_forward(sizes, own, dtype, device, packed=packed, cached=cached, part=part)
        reason = f"{reason}; rank {self.rank} of {layout.ranks}"
        if layout.stages == 1:
            return forward, reason
        assert isinstance(forward, CompiledForward), "others refuse a part that is a stage"
        vocab = config.output_size if self.rank == 0 else 0
        placed = self._stage(mine, config.num_layers, len(layers[0]))
        return StageForward(forward, placed, config.hidden_size, vocab, dtype), reason

    def _stage(self, layers: range, count: int, first: int) -> Stage:
        """The stage of these layers, with its neighbours."""
        last = self.layout.ranks - self.layout.together
        back = {0: last, last: 0}.get(self.rank, -1)
        after = self.rank + self.layout.together if layers.stop < count else -1
        before = self.rank - self.layout.together if layers.start else -1
        peers, stages = self.peers, self.layout.stages
        return Stage(stages, layers, count, first, peers.get(before), peers.get(after), peers.get(back))


def _never() -> None:
    """Hear of no rank that is lost."""


def join_group(
    plan: Plan,
    listener: socket.socket,
    secret: bytes,
    leader: tuple[str, int] | None,
    check: Callable[[], None] = _never,
) -> RankPart:
    """Connect the plan's rank to those that it exchanges rows with. ``leader`` is where rank 0 listens, or None.

    A rank connects to those before it, then waits for those behind it, so all find each other. Raises RunnerLost, and
    what ``check`` raises once a rank is lost meanwhile.
    """
    rank, layout = plan.rank, plan.layout
    connections: dict[int, Connection] = {}
    wanted = layout.peers(rank, over_sockets=not plan.memory and layout.together > 1)
    for peer in [each for each in wanted if each < rank]:
        where = leader if peer == 0 and leader is not None else (plan.hosts[peer], plan.ports[peer])
        connections[peer] = connect(where, secret, peer, plan.seconds)
        connections[peer].send(Kind.HELLO, str(rank).encode())
    later = {each for each in wanted if each > rank}
    until = time.monotonic() + plan.seconds
    while later:
        check()
        joined = admit_rank(listener, secret, plan.seconds, min(until, time.monotonic() + 1))
        if joined is None:
            if time.monotonic() > until:
                raise RunnerLost(f"not all ranks have found each other within {plan.seconds:g} s")
            continue
        named = joined.expect(Kind.HELLO)
        joined.rank = int(named) if named.isdigit() else -1
        if joined.rank not in later:
            raise RunnerLost(f"a rank joined that calls itself {bytes(named)!r:.20}, and nobody waits for it")
        connections[joined.rank] = joined
        later.discard(joined.rank)
    members = layout.group(rank)
    if layout.together == 1:
        return RankPart(rank, layout, None, connections)
    group: SharedGroup | SocketGroup
    if plan.memory:
        group = SharedGroup(Path(plan.memory), members, members.index(rank), plan.seconds)
    else:
        group = SocketGroup(connections, members, members.index(rank))
    return RankPart(rank, layout, group, connections)


def admit_rank(listener: socket.socket, secret: bytes, seconds: float, until: float) -> Connection | None:
    """Wait until then for one that knows the secret; others are sent away, with a line in the log."""
    while (left := until - time.monotonic()) > 0:
        listener.settimeout(left)
        try:
            opened, peer = listener.accept()
        except TimeoutError:
            break
        try:
            admit(opened, secret)
        except WrongSecret as reason:
            _log.warning("the connection of %s was ended: %s", peer[0], reason)
            opened.close()
            continue
        return Connection(opened, -1, seconds)
    return None
