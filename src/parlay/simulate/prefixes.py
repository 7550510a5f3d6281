"""Simulates a server's prefix cache, from which a request gets the keys and values of a beginning that it shares."""

from __future__ import annotations

from collections import OrderedDict

from parlay.simulate.traffic import Arrival


class Prefixes:
    """The cached prefixes of a server: how many tokens of each session and each kind it holds.

    The least recently used prefix is evicted first.
    """

    def __init__(self) -> None:
        self._tokens: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._num_tokens = 0

    def find(self, request: Arrival) -> int:
        """Return how many of the prompt's first tokens are cached."""
        common = self._look(("kind", request.kind)) if request.common else 0
        history = self._look(("session", request.session)) if request.history else 0
        return max(min(common, request.common), min(history, request.history))

    def read(self, request: Arrival) -> None:
        """Cache the tokens that all requests of the kind share. This is called once the prompt has been read."""
        if request.common:
            known = self._tokens.get(("kind", request.kind), 0)
            self._keep(("kind", request.kind), max(known, request.common))

    def write(self, request: Arrival, free: int) -> None:
        """Cache the text of a request that has ended, and evict prefixes until at most ``free`` tokens are held."""
        if request.session:
            self._keep(("session", request.session), request.prompt + request.output)
        while self._num_tokens > free and self._tokens:
            self._num_tokens -= self._tokens.popitem(last=False)[1]

    def _look(self, key: tuple[str, str]) -> int:
        tokens = self._tokens.get(key, 0)
        if tokens:
            self._tokens.move_to_end(key)
        return tokens

    def _keep(self, key: tuple[str, str], tokens: int) -> None:
        self._num_tokens += tokens - self._tokens.pop(key, 0)
        self._tokens[key] = tokens
