"""Other engines, each in its own process, as decoders that `parlay.bench` can measure beside Parlay's strategies."""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.figures.systems import Timed
from benchmarks.peers.rounds import PAUSE_SECONDS, Entrant
from parlay.bench.wave import Answer, Ask, Wave
from parlay.types import Exactness, Metrics


class PeerDecoder:
    """Implements `Decoder`: plain greedy decoding by one peer, one request at a time."""

    def __init__(self, entrant: Entrant) -> None:
        self._entrant = entrant

    def decode(self, strategy: str, asks: Sequence[Ask], temperature: float) -> Wave:
        """See `Decoder`. Raises Failed where the peer has no answer."""
        (ask,) = asks
        time.sleep(PAUSE_SECONDS)  # threads of whoever decoded before stop spinning
        timed = self._entrant.decode(ask.ids, ask.most)
        time.sleep(PAUSE_SECONDS)
        seconds = timed.first_seconds + timed.decode_seconds
        after_first = len(timed.tokens) - timed.first_tokens
        return Wave((_answer(strategy, ask, timed),), seconds, after_first, timed.decode_seconds, 0, None)


def _answer(strategy: str, ask: Ask, timed: Timed) -> Answer:
    metrics = Metrics(
        strategy,
        Exactness.SEED,
        prompt_tokens=len(ask.ids),
        completion_tokens=len(timed.tokens),
        steps=timed.steps,
    )
    last = timed.first_seconds + timed.decode_seconds
    return Answer(timed.tokens, timed.first_tokens, timed.first_seconds, last, metrics)
