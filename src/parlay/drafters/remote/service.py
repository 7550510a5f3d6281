"""The server of a drafting service: a drafter, and the texts of other processes that it drafts for."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from parlay.drafters.remote.messages import Answer, KnownTokens, TextUpdate, answer_as_json, read_answers
from parlay.drafters.token_text import TokenText, open_text
from parlay.types import NO_DRAFT, Draft, Drafter, Observation, Verdict, trees

MOST_TOKENS = 1 << 22
"""The most tokens of all texts together. The text without an update for longest is forgotten first."""
MOST_TEXTS = 1 << 14
"""The most texts, because each has a state in the drafter, however short it is."""
MOST_NODES = 1024
"""The most nodes of a draft, if the drafter's own limit is not known."""


_log = logging.getLogger(__name__)


class Owner(NamedTuple):
    """The owner of texts. Stores learn per tenant; each client numbers its texts itself."""

    tenant: str
    client: str


Asked = tuple[Owner, TextUpdate]
"""The owner of a text, and its update."""
_Name = tuple[Owner, int]


class DraftService:
    """Drafts for texts of many owners at once. Not thread-safe: one thread calls it.

    A text's state is a cache: if it was forgotten, the answer asks for tokens again. ``vocab_size`` bounds the ids,
    ``longest`` the tokens of a text, ``most_nodes`` each draft, whatever a client asks for.
    """

    def __init__(
        self,
        drafter: Drafter,
        vocab_size: int,
        longest: int,
        *,
        most_tokens: int = MOST_TOKENS,
        most_texts: int = MOST_TEXTS,
        most_nodes: int = MOST_NODES,
    ) -> None:
        self._drafter = drafter
        self.vocab_size, self.longest = vocab_size, longest
        self._most_nodes = most_nodes
        self._most_tokens, self._most_texts = most_tokens, most_texts
        self._texts: OrderedDict[_Name, TokenText] = OrderedDict()
        self._num_tokens = 0
        self._opened = 0

    def __len__(self) -> int:
        return len(self._texts)

    def draft(self, asked: Sequence[Asked]) -> list[Answer]:
        """Apply the update of each text, and draft for all texts at once.

        An update that begins a text has at least one token. Raises ValueError for facts that no request may have.
        """
        answers: list[Answer] = [NO_DRAFT] * len(asked)
        places: dict[_Name, int] = {}
        observations: list[Observation] = []
        for place, (owner, update) in enumerate(asked):
            name = owner, update.id
            known = len(self._texts[name].tokens) if name in self._texts else 0
            if update.start > known or name in places:
                answers[place] = KnownTokens(min(known, update.start))
                continue
            seen = self._take(name, update)
            observations += [seen] if seen is not None else []
            places[name] = place
        self._forget(places)
        if observations and self._drafter.needs.outcomes:
            self._drafter.observe(observations)
        texts = {name: self._texts[name] for name in places if asked[places[name]][1].most > 0}
        budgets = [min(asked[places[name]][1].most, self._most_nodes) for name in texts]
        drafts = self._propose(list(texts.values()), budgets) if texts else []
        for (name, text), draft, most in zip(texts.items(), drafts, budgets, strict=True):
            text.draft = trees.first(trees.without_probes(draft), most)
            answers[places[name]] = text.draft
        return answers

    def _propose(self, texts: Sequence[TokenText], budgets: Sequence[int]) -> list[Draft]:
        """Draft for all texts. If that fails, draft for each alone, so that one text costs no other client its drafts.

        Raises what the drafter raises if it fails for all of them.
        """
        try:
            return self._drafter.propose(texts, budgets)
        except Exception as error:
            if len(texts) == 1:
                raise
            _log.warning(
                "drafting for %d texts failed (%s: %s): each is tried alone", len(texts), type(error).__name__, error
            )
        drafts, failed = [NO_DRAFT] * len(texts), list[Exception]()
        for place, (text, budget) in enumerate(zip(texts, budgets, strict=True)):
            try:
                (drafts[place],) = self._drafter.propose([text], [budget])
            except Exception as error:
                self._drafter.release(text.sequence)  # its state may be wrong now
                failed.append(error)
        if len(failed) == len(texts):
            raise failed[0]
        return drafts

    def release(self, owner: Owner, ids: Iterable[int]) -> None:
        """Forget these texts of the owner. Unknown ones are ignored."""
        for number in ids:
            self._drop((owner, number))

    def _take(self, name: _Name, update: TextUpdate) -> Observation | None:
        """Apply an update. Returns the outcome of the text's last draft, if the text has only grown."""
        text = self._texts.get(name)
        if text is None or update.start < text.prompt_length or text.request.key != update.facts.key:
            opened = self._open(name, update, text.tokens[: update.start] if text is not None else [])
            self._drop(name)
            self._texts[name] = opened
            self._num_tokens += len(opened.tokens)
            return Observation(opened, NO_DRAFT, Verdict((), tuple(opened.tokens[-1:])))
        self._texts.move_to_end(name)
        self._num_tokens += update.start + len(update.tokens) - len(text.tokens)
        if update.start < len(text.tokens):
            del text.tokens[update.start :]
            text.draft = NO_DRAFT
        return text.commit(update.tokens) if update.tokens else None

    def _open(self, name: _Name, update: TextUpdate, before: Sequence[int]) -> TokenText:
        """Open a text. Raises ValueError for facts that no request may have."""
        facts = update.facts
        self._opened += 1
        return open_text(
            self._opened,
            [*before, *update.tokens],
            facts.params,
            prompt_length=min(facts.prompt_length, update.start + len(update.tokens)),
            key=facts.key,
            salt=f"{name[0].tenant}:{facts.salt}",
            store=facts.store,
        )

    def _forget(self, wanted: Iterable[_Name]) -> None:
        """Drop the oldest texts until the rest fit, but not the texts that are ``wanted`` now."""
        if self._fit():
            return
        stay = set(wanted)
        for name in [name for name in self._texts if name not in stay]:
            self._drop(name)
            if self._fit():
                return

    def _fit(self) -> bool:
        return self._num_tokens <= self._most_tokens and len(self._texts) <= self._most_texts

    def _drop(self, name: _Name) -> None:
        text = self._texts.pop(name, None)
        if text is not None:
            self._num_tokens -= len(text.tokens)
            self._drafter.release(text.sequence)


class LocalLink:
    """A `Link` to a service in this process. Answers are still written to JSON and read."""

    def __init__(self, service: DraftService, source: str) -> None:
        self._service, self._source = service, source

    def ask(self, updates: Sequence[TextUpdate], over: Sequence[int]) -> list[Answer] | None:
        owner = Owner("", "")
        self._service.release(owner, over)
        answers = self._service.draft([(owner, update) for update in updates])
        reply = {"drafts": [answer_as_json(answer) for answer in answers]}
        return read_answers(reply, updates, self._service.vocab_size, self._source)
