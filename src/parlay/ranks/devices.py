"""Groups of ranks on CUDA devices: NCCL gives every rank what all have, and each adds that up in the order of ranks.

So sums promise what they do in the host's memory: a row's depend on no other row, as NCCL's own sums would not promise.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from parlay.models.part import Loss
from parlay.ranks.wire import Connection, Kind, listen, one_line
from parlay.types import ParlayError, RunnerLost

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, ProcessGroup, Store

_BLOCKS = "TORCH_NCCL_BLOCKING_WAIT"
"""With it whoever waits for an exchange raises when its time is over; else torch ends the process."""


class MakeBackend(Protocol):
    """Makes what carries numbers between so many processes, of which this is the ``member``-th; see `nccl`."""

    def __call__(self, store: Store, member: int, count: int, seconds: float) -> Backend: ...


class DeviceGroup:
    """A `Group` whose numbers lie on a device. ``ranks`` are its members, and ``processes`` what torch has of them."""

    def __init__(self, processes: ProcessGroup, device: torch.device, ranks: Sequence[int], seconds: float) -> None:
        self._processes, self.device, self._ranks, self._seconds = processes, device, ranks, seconds
        self.loss: Loss | None = None

    def add(self, numbers_N: Tensor) -> None:
        if self.loss is not None:
            return
        own = numbers_N.view(-1)
        parts = [torch.empty_like(own) for _ in self._ranks]
        try:
            self._processes.allgather([parts], [own]).wait()
        except RuntimeError as error:  # torch's errors of exchanges are such
            who = f"one of ranks {', '.join(map(str, self._ranks))}"
            what = f"has not done its part of a forward within {self._seconds:g} s"
            self.loss = Loss(None, f"{who} {what} ({one_line(error)})")
            return
        first, second, *others = parts
        torch.add(first, second, out=own)
        for part in others:
            own += part

    def give_up(self) -> None:
        """Let nobody wait in a sum any more. Any thread may call it."""
        with suppress(RuntimeError):
            self._processes.abort()


def nccl(store: Store, member: int, count: int, seconds: float) -> Backend:
    """NCCL, which waits so long for an exchange. Raises ParlayError in a build of torch without it."""
    try:
        from torch._C._distributed_c10d import ProcessGroupNCCL
    except ImportError:
        raise ParlayError(
            "ranks on GPUs need NCCL, and this build of torch has none: run the model on one GPU, or with device cpu"
        ) from None
    os.environ.setdefault(_BLOCKS, "1")
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds)
    return ProcessGroupNCCL(store, member, count, options)


def device_group(
    connections: Mapping[int, Connection],
    ranks: Sequence[int],
    member: int,
    device: torch.device,
    *,
    seconds: float,
    backend: MakeBackend = nccl,
) -> DeviceGroup:
    """Join the others of ``ranks``, each of which has a CUDA device of its own. Raises ParlayError."""
    from torch._C._distributed_c10d import ProcessGroup

    store = _meet(connections, ranks, member, seconds)
    processes = ProcessGroup(store, member, len(ranks))
    made = backend(store, member, len(ranks), seconds)
    processes._register_backend(torch.device(device.type), ProcessGroup.BackendType.NCCL, made)
    return DeviceGroup(processes, device, ranks, seconds)


def _meet(connections: Mapping[int, Connection], ranks: Sequence[int], member: int, seconds: float) -> Store:
    """Open the store in which torch's backends find each other: the first of ``ranks`` has it, and tells the others.

    It is in the network in which the ranks have joined, and asks nobody for a secret. Raises RunnerLost.
    """
    from torch._C._distributed_c10d import TCPStore

    limit = timedelta(seconds=seconds)
    if member:
        said = bytes(connections[ranks[0]].expect(Kind.DATA)).decode(errors="replace")
        host, _, port = said.rpartition(" ")
        if not host or not port.isdecimal():
            raise RunnerLost(f"rank {ranks[0]} did not say where its store is: are the versions the same?")
        return TCPStore(host, int(port), len(ranks), is_master=False, timeout=limit, wait_for_workers=False)
    others = [connections[rank] for rank in ranks[1:]]
    host = others[0].local_host
    listener = listen((host, 0))
    port_here, handle = listener.getsockname()[1], listener.detach()
    store = TCPStore(
        host,
        port_here,
        len(ranks),
        is_master=True,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=handle,
    )
    for connection in others:
        connection.send(Kind.DATA, f"{host} {port_here}".encode())
    return store
