"""A drafter in another process: new tokens are sent to it, and drafts come back, or nothing in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parlay.drafters.per_sequence import FromText, History
from parlay.drafters.remote.link import Link, ServiceLink, Vocabulary
from parlay.drafters.remote.messages import KnownTokens, TextUpdate, facts_of
from parlay.drafters.resources import Resources
from parlay.drafters.stores.datastore_file import fingerprint
from parlay.options import NotNamed, Options, option
from parlay.types import NO_DRAFT, Draft, SequenceView

SOURCE = "remote"
_MOST_OVER = 4096
"""The most finished texts that the service is still to be told of; it forgets others by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions(Options):
    """Options of a remote drafter: its address, and how long to wait for it."""

    url: str = option("", "URL of a `parlay serve --drafter-only`, as in http://HOST:8001", opens=True)
    deadline_ms: float = option(
        100.0, "milliseconds after which the step continues without a draft", low=0.1, high=60_000
    )
    retry_s: float = option(5.0, "seconds before asking a service again that failed", low=0.1, high=3600)


class Remote(FromText):
    """A drafter behind ``parlay serve --drafter-only``, on this host or another (Parlay's own protocol).

    Each request sends the new tokens of each text; the service caches the rest. Replies are checked, and failures cost
    only drafts: a late, wrong or missing answer is an empty draft.
    """

    def __init__(self, resources: Resources, options: RemoteOptions) -> None:
        if not options.url:
            raise NotNamed(f"strategy {SOURCE} needs url=URL, of a service: start one with parlay serve --drafter-only")
        self._link: Link
        if resources.open_drafter is not None:
            self._link = resources.open_drafter(options.url)
        else:
            known = fingerprint(resources.tokenizer) if resources.tokenizer is not None else ""
            link = self._link = ServiceLink(
                options.url,
                Vocabulary(resources.vocab_size, known),
                SOURCE,
                deadline=options.deadline_ms / 1000,
                retry=options.retry_s,
            )
            resources.closing.callback(link.close)
        self._sent: dict[int, History] = {}
        self._over: list[int] = []

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(views)
        places = [place for place, budget in enumerate(budgets) if budget > 0]
        if not places:
            return drafts
        updates = [self._news(views[place], budgets[place]) for place in places]
        answers = self._link.ask(updates, self._over)
        if answers is None:  # how much the service has of the texts turns out next time
            return drafts
        self._over = []
        for place, update, answer in zip(places, updates, answers, strict=True):
            history = self._sent[views[place].sequence]
            if isinstance(answer, KnownTokens):
                history.cut(answer.tokens)
            else:
                history.cut(update.start)
                history.tokens.extend(update.tokens)
                drafts[place] = answer
        return drafts

    def _news(self, view: SequenceView, budget: int) -> TextUpdate:
        """The tokens of a text that the service lacks, as far as known; at least the last token."""
        history = self._sent.setdefault(view.sequence, History())
        start = min(history.agree(view.tokens), len(view.tokens) - 1)
        return TextUpdate(view.sequence, start, view.tokens[start:], budget, facts_of(view))

    def release(self, sequence: int) -> None:
        if self._sent.pop(sequence, None) is not None and len(self._over) < _MOST_OVER:
            self._over.append(sequence)
