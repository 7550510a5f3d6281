"""Groups of ranks on CUDA devices. NCCL gathers all ranks' numbers on each rank, which adds them in the order of ranks.

So sums have the same guarantee as in host memory: a row's sum does not depend on other rows. NCCL's own sums do not
guarantee that.
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
from parlay.ranks.wire import Connection, Kind, listen
from parlay.types import ParlayError, RunnerLost, one_line

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, ProcessGroup, Store

_BLOCKS = "TORCH_NCCL_BLOCKING_WAIT"
"""Environment variable of torch. If it is set, a failed exchange raises in the waiting thread; otherwise torch ends the
process."""


class MakeBackend(Protocol):
    """Makes the backend that connects ``count`` processes, of which this one is number ``member``; see `nccl`."""

    def __call__(self, store: Store, member: int, count: int, seconds: float) -> Backend: ...


class DeviceGroup:
    """A `Group` whose numbers are on a device. ``ranks`` are its members, and ``processes`` is torch's process
    group."""

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
        except RuntimeError as error:  # torch raises this for failed exchanges
            who = f"one of ranks {', '.join(map(str, self._ranks))}"
            what = f"has not done its part of a forward within {self._seconds:g} s"
            self.loss = Loss(None, f"{who} {what} ({one_line(error)})")
            return
        first, second, *others = parts
        torch.add(first, second, out=own)
        for part in others:
            own += part

    def give_up(self) -> None:
        """Make all waiting sums fail now. Any thread may call this."""
        with suppress(RuntimeError):
            self._processes.abort()


def nccl(store: Store, member: int, count: int, seconds: float) -> Backend:
    """Make the NCCL backend, which waits at most ``seconds`` for an exchange. Raises ParlayError if torch was built
    without NCCL."""
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
    """Join the other ranks in ``ranks``, each of which has its own CUDA device. Raises ParlayError if that fails."""
    from torch._C._distributed_c10d import ProcessGroup

    store = _meet(connections, ranks, member, seconds)
    processes = ProcessGroup(store, member, len(ranks))
    made = backend(store, member, len(ranks), seconds)
    processes._register_backend(torch.device(device.type), ProcessGroup.BackendType.NCCL, made)
    return DeviceGroup(processes, device, ranks, seconds)


def _meet(connections: Mapping[int, Connection], ranks: Sequence[int], member: int, seconds: float) -> Store:
    """Open the key-value store through which torch's backends find each other. The first of ``ranks`` hosts the store,
    and tells the others its address.

    The store listens on the network over which the ranks have joined, and asks for no secret. Raises RunnerLost if
    another rank can't be reached.
    """
    from torch._C._distributed_c10d import TCPStore

    limit = timedelta(seconds=seconds)
    if member:
        address = bytes(connections[ranks[0]].expect(Kind.DATA)).decode(errors="replace")
        host, _, port = address.rpartition(" ")
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
