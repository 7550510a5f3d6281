"""LoRA adapters for single requests, when several ranks run the model. All ranks read an adapter before a row uses it.

Rank 0 numbers the adapters that all ranks have read. Each rank keeps its part of the matrices, and drops it when rank 0
does.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from parlay.models.lora_layout import BadAdapter
from parlay.models.native import NativeRunner
from parlay.ranks.layout import AdapterAnswer, AdapterOrder, decode_adapter_order, encode
from parlay.ranks.wire import Connection, Kind
from parlay.types import Adapter, Runner, RunnerLost, one_line


class Readers(Protocol):
    """The other ranks, which read adapters when rank 0 asks them to."""

    def read_adapter(self, order: AdapterOrder) -> None:
        """Have all other ranks read an adapter, and wait for them. Raises BadAdapter if one of them can't, and
        RunnerLost."""
        ...


class AdapterBook:
    """Rank 0's numbers for adapters that all ranks have read. Any thread may use this object."""

    def __init__(self, name: str, others: Readers) -> None:
        """``name`` is the model's name, for messages."""
        self._name, self._others = name, others
        self._numbers: weakref.WeakKeyDictionary[Adapter, int] = weakref.WeakKeyDictionary()
        self._count, self._gone = itertools.count(1), deque[int]()

    def share(self, folder: Path, adapter: Adapter) -> None:
        """Have all other ranks read an adapter that this rank has read. Raises BadAdapter if one of them can't, and
        RunnerLost."""
        number = next(self._count)
        order = AdapterOrder(number=number, name=adapter.name, folder=str(folder), salt=adapter.salt)
        try:
            self._others.read_adapter(order)
        except BadAdapter:
            self._gone.append(number)
            raise
        self._numbers[adapter] = number
        weakref.finalize(adapter, self._gone.append, number).atexit = False

    def number(self, adapter: Adapter | None) -> int:
        """Return the number of an adapter; 0 for None. Raises ValueError if the other ranks have not read the
        adapter."""
        if adapter is None:
            return 0
        found = self._numbers.get(adapter)
        if found is None:
            raise ValueError(f"{self._name}: the adapter {adapter.name!r:.60} was not read by all of its processes")
        return found

    def forgotten(self) -> Iterator[int]:
        """Yield the numbers of adapters that no row can use any more."""
        while self._gone:
            yield self._gone.popleft()


class AdapterShelf:
    """The adapters that a rank other than 0 has read, by rank 0's numbers. Rank 0 decides which rows use them."""

    def __init__(self, runner: Runner, connection: Connection) -> None:
        self._runner, self._connection = runner, connection
        self.by_number: dict[int, Adapter] = {}

    def read(self, content: bytes | bytearray) -> None:
        """Start reading an adapter in a thread; rank 0 is told the result. Raises RunnerLost for an invalid order."""
        order = decode_adapter_order(content)
        threading.Thread(target=self._read, args=(order,), name="parlay-adapter", daemon=True).start()

    def _read(self, order: AdapterOrder) -> None:
        try:
            self.by_number[order.number] = self._adapter(order)
            reason = ""
        except Exception as error:  # rank 0 then refuses the adapter, and the ranks go on
            reason = one_line(error)
        with suppress(RunnerLost):  # the thread that waits for calls notices it, too
            self._connection.send(Kind.ADAPTER, encode(AdapterAnswer(number=order.number, reason=reason)))

    def _adapter(self, order: AdapterOrder) -> Adapter:
        if not isinstance(self._runner, NativeRunner):
            raise BadAdapter(f"{self._runner.spec.name} runs no adapters here")
        adapter = self._runner.read_adapter(Path(order.folder), order.name)
        if adapter.salt != order.salt:
            raise BadAdapter(f"{order.folder} has another adapter there than on rank 0: copy the files of rank 0")
        return adapter
