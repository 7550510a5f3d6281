"""Groups on CUDA devices, without one: gloo in NCCL's place, or tensors that have a device and no numbers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup, HashStore, ProcessGroup, ProcessGroupGloo, Store
from torch._subclasses.fake_tensor import FakeTensorMode

from parlay.models.torch_ops.linear import summed
from parlay.ranks.devices import DeviceGroup, device_group, nccl
from parlay.ranks.layout import Plan
from parlay.ranks.part import RankPart, join_group
from parlay.ranks.starting import device_of
from parlay.ranks.wire import Connection, Door, listen
from parlay.types import ParlayError

CPU, SECRET = torch.device("cpu"), b"a secret of the ranks"


def gloo(store: Store, member: int, count: int, seconds: float) -> ProcessGroupGloo:
    return ProcessGroupGloo(store, member, count, timedelta(seconds=seconds))


def at_once(*calls: Callable[[], None]) -> None:
    """Make calls in threads of their own, and raise what one of them raises."""
    errors: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]


def test_sums_are_added_in_the_order_of_ranks() -> None:
    """Whatever their number is; the ranks find each other over their own connections."""
    ranks, draw = (4, 5, 6), torch.Generator().manual_seed(0)
    parts_3N = torch.randn(3, 50, generator=draw) * 10 ** torch.randint(0, 7, (3, 50), generator=draw)
    (first, second), (other, third) = pair(), pair()
    ends = [{5: first, 6: other}, {4: second}, {4: third}]
    found = [torch.empty(0)] * 3

    def run(member: int) -> None:
        connections = {rank: Connection(opened, rank, 30) for rank, opened in ends[member].items()}
        group = device_group(connections, ranks, member, CPU, seconds=30, backend=gloo)
        found[member] = parts_3N[member].clone()
        group.add(found[member])
        assert group.loss is None
        for connection in connections.values():
            connection.close()

    at_once(*(partial(run, member) for member in range(3)))
    expected = (parts_3N[0] + parts_3N[1]) + parts_3N[2]
    assert all(own.equal(expected) for own in found)
    assert not expected.equal((parts_3N[1] + parts_3N[2]) + parts_3N[0])


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return socket.create_connection(listener.getsockname()), listener.accept()[0]


def fake_group(device: str, count: int = 2) -> DeviceGroup:
    """A group whose exchanges go nowhere."""
    processes = ProcessGroup(HashStore(), 0, count)
    backend = FakeProcessGroup._create_internal(0, count)
    processes._register_backend(torch.device("cuda"), ProcessGroup.BackendType.CUSTOM, backend)
    return DeviceGroup(processes, torch.device(device), range(count), 5)


def test_nothing_leaves_the_device() -> None:
    """Where tensors of two devices met, or one were read by the host, this would raise."""
    with FakeTensorMode():
        given = torch.empty(3, 8, device="cuda:1", dtype=torch.bfloat16)
        sums = summed(given, fake_group("cuda:1"))
    assert (sums.device, sums.dtype, sums.shape) == (given.device, given.dtype, given.shape)


class _Broken:
    """Processes of which one is gone."""

    def allgather(self, parts: list[list[Tensor]], own: list[Tensor]) -> dist.Work:
        raise RuntimeError("NCCL communicator was aborted\n on rank 0")

    def abort(self) -> None:
        raise RuntimeError("it was aborted before")


def test_an_exchange_that_fails_is_one_line_and_the_last() -> None:
    group, numbers = DeviceGroup(_Broken(), CPU, range(2), 5), torch.ones(4)  # type: ignore[arg-type]
    group.add(numbers)
    assert group.loss is not None
    assert group.loss.reason == (
        "one of ranks 0, 1 has not done its part of a forward within 5 s (NCCL communicator was aborted on rank 0)"
    )
    group.add(numbers)
    group.give_up()
    assert numbers.equal(torch.ones(4))


@pytest.mark.skipif(dist.is_nccl_available(), reason="this build has NCCL")
def test_a_build_without_nccl_is_one_line() -> None:
    with pytest.raises(ParlayError, match="ranks on GPUs need NCCL, and this build of torch has none"):
        nccl(HashStore(), 0, 2, 5)


def test_ranks_of_one_machine_have_its_devices_one_after_another() -> None:
    machines = ["here", "here", "there", "here", "there"]
    assert [device_of("cuda", machines, rank) for rank in range(1, 5)] == ["cuda:1", "cuda:0", "cuda:2", "cuda:1"]
    assert [device_of("cuda:2", machines, rank) for rank in range(1, 3)] == ["cuda:3", "cuda:0"]
    assert device_of("cpu", machines, 1) == "cpu"


def test_ranks_on_cuda_devices_join_in_groups_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though they are on one machine, whose memory they could share."""
    monkeypatch.setattr("parlay.ranks.part.device_group", partial(device_group, backend=gloo))
    plan = Plan(
        **dict.fromkeys(("tensor", "stages", "context", "span"), 1),
        **dict.fromkeys(("model", "digest", "adapter"), ""),
        **dict.fromkeys(("quantize", "threads", "lora"), None),
        rank=0,
        hosts=[],
        ports=[],
        memory=["", ""],
        seconds=30,
        dtype="bfloat16",
        device="cuda",
        kv_cache_dtype="auto",
    )
    plan, found = replace(plan, tensor=2), dict[int, RankPart]()
    with listen(("127.0.0.1", 0)) as leader, listen(("127.0.0.1", 0)) as listener:

        def join(rank: int) -> None:
            own = replace(plan, rank=rank, hosts=["", ""], ports=[0, 0], device=device_of("cuda", ["a", "a"], rank))
            where = leader.getsockname()[:2] if rank else None
            found[rank] = join_group(own, Door(listener if rank else leader, SECRET, own.seconds), where)

        at_once(partial(join, 0), partial(join, 1))
    groups = [found[rank].group for rank in range(2)]
    assert all(isinstance(group, DeviceGroup) for group in groups)
    assert [group.device for group in groups if group is not None] == [torch.device("cuda:0"), torch.device("cuda:1")]
    assert all(part.context is None for part in found.values())
    for part in found.values():
        part.give_up()
