"""Things made of a text once, and shared by all samples of the request that brought it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

Texts = tuple[tuple[int, ...], ...]


class OfTexts(Protocol):
    @property
    def texts(self) -> Texts: ...


T = TypeVar("T", bound=OfTexts)


class Shared(Generic[T]):
    """Keeps what ``make`` makes of texts while a sequence uses it. Texts are told apart as objects: none is hashed."""

    def __init__(self, make: Callable[[Texts], T]) -> None:
        self._make = make
        self._made: WeakValueDictionary[int, T] = WeakValueDictionary()

    def of(self, texts: Texts) -> T:
        found = self._made.get(id(texts))
        if found is None or found.texts is not texts:
            found = self._made[id(texts)] = self._make(texts)
        return found
