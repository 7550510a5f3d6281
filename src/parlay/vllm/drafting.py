"""Drafts chains with one strategy for texts that another engine decodes: budgets, proposals and observations."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from parlay.drafters.token_text import TokenText
from parlay.types import NO_DRAFT, Budgets, Cost, Draft, Observation, Spent, Strategy, trees

_log = logging.getLogger("vllm.parlay")  # a child of vLLM's logger, whose handler prints it


class ChainDrafting:
    """Drafts for all texts of a batch as the strategy's policy decides; each draft is cut to its best chain.

    ``cost`` learns from the steps between calls. If a drafter raises, its texts get no draft in that step. A draft is
    cut before the first id of ``vocab_size`` or more, which only padded embedding rows have.
    """

    def __init__(
        self, strategy: Strategy, cost: Cost, vocab_size: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._strategy = strategy
        self._vocab_size = vocab_size
        self._cost = cost
        self._clock = clock
        self._planned: list[TokenText] = []
        """The texts of the last step."""
        self._inactive = 0
        """The number of further steps of these texts in which the policy is inactive."""
        self._is_inactive = False
        self._drafting, self._planning = [0.0] * len(strategy.drafters), 0.0
        """Seconds that each drafter, and the policy, took in the last step."""
        self._said: set[str] = set()

    def learn(self, observations: Sequence[Observation], seconds: float) -> None:
        """Report a step to the drafters and the policy. ``seconds`` is the step's duration, or 0 if the step did more
        than decode these texts."""
        if not observations:
            return
        rows = sum([len(each.draft) + 1 for each in observations])
        context = sum([len(each.view.tokens) for each in observations]) // len(observations)
        if seconds:
            self._cost.record(rows, context, seconds)
        for number, drafter in enumerate(self._strategy.drafters):
            if drafter.needs.outcomes:
                began = self._clock()
                drafter.observe(observations)
                self._drafting[number] += self._clock() - began
        planned = set(self._planned)
        known = [each for each in observations if each.view in planned]
        if known and not self._is_inactive:
            forward, count = seconds or self._cost.forward(rows, context), len(known)
            spent = Spent(sum(self._drafting) / count, forward, rows, context, tuple(self._drafting), self._planning)
            accepted = [len(each.verdict.path) for each in known]
            self._strategy.policy.learn([each.view for each in known], [each.draft for each in known], accepted, spent)

    def draft(self, texts: Sequence[TokenText], rooms: Sequence[int]) -> None:
        """Draft for each text a chain of at most as many tokens as ``rooms`` allows."""
        self._drafting, self._planning = [0.0] * len(self._drafting), 0.0
        self._is_inactive = self._inactive > 0 and list(texts) == self._planned
        self._planned = list(texts)
        if self._is_inactive or not texts:
            self._inactive -= self._is_inactive
            return
        began, policy = self._clock(), self._strategy.policy
        proposed: dict[TokenText, Draft] = {}
        budgets = policy.plan(texts)
        for _ in self._strategy.drafters:
            if not any(budgets.nodes):
                break
            offers = self._ask(texts, rooms, budgets)
            proposed = trees.with_offers(proposed, offers)
            budgets = policy.next_budgets(texts, [offers.get(text, NO_DRAFT) for text in texts])
        self._inactive = 0 if proposed else budgets.inactive
        if any(map(len, proposed.values())):
            for text, draft in zip(proposed, policy.trim(list(proposed), list(proposed.values())), strict=True):
                text.draft = draft
        self._planning = max(0.0, self._clock() - began - sum(self._drafting))

    def release(self, text: TokenText) -> None:
        """Forget a finished text."""
        self._strategy.policy.release(text.sequence)
        for drafter in self._strategy.drafters:
            drafter.release(text.sequence)

    def _ask(self, texts: Sequence[TokenText], rooms: Sequence[int], budgets: Budgets) -> dict[TokenText, Draft | None]:
        """Ask each drafter once, for all texts that it drafts for. A text's draft is None if its drafter failed."""
        offers: dict[TokenText, Draft | None] = {}
        numbers = budgets.drafters or [0] * len(texts)
        for number, drafter in enumerate(self._strategy.drafters):
            limits = {
                text: min(nodes, room)
                for text, nodes, room, asked in zip(texts, budgets.nodes, rooms, numbers, strict=True)
                if asked == number and nodes > 0
            }
            if limits:
                began = self._clock()
                try:
                    drafts = drafter.propose(list(limits), list(limits.values()))
                    for (text, limit), draft in zip(limits.items(), drafts, strict=True):
                        offers[text] = self._sound_chain(draft, limit)
                except Exception as error:
                    offers |= dict.fromkeys(limits)
                    self._say(f"a drafter of {self._strategy.name} failed: {type(error).__name__}: {error}", error)
                self._drafting[number] += self._clock() - began
        return offers

    def _sound_chain(self, draft: Draft, limit: int) -> Draft:
        chain = trees.best_chain(trees.first(draft, limit))
        ids = chain.tree.tokens
        end = next((place for place, token in enumerate(ids) if not 0 <= token < self._vocab_size), len(ids))
        return trees.subtree(chain, range(end))

    def _say(self, message: str, error: Exception) -> None:
        """Log a failure with its traceback the first time it occurs."""
        if message not in self._said and len(self._said) < 16:
            self._said.add(message)
            _log.warning("%s; its texts are decoded without drafts", message, exc_info=error)
