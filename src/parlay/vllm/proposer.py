"""The proposer that each vLLM worker asks for drafts after each step, and the part of it that SGLang's adapter shares.

The interface is vLLM 0.32's (``vllm/v1/spec_decode/custom_class_proposer.py``, and its calls in
``vllm/v1/worker/gpu_model_runner.py``): a constructor that takes the config, `Proposer.propose` and, for the CPU
runner, `Proposer.load_model`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

from parlay.cost.measured import MeasuredCost
from parlay.drafters.resources import Resources
from parlay.drafters.token_text import TokenText, check_tokens_suffice
from parlay.models.fetch.resolving import is_local, resolve_tokenizer
from parlay.models.loading import load_tokenizer
from parlay.options import UsageError
from parlay.strategies.built import StrategyCache
from parlay.strategies.catalogue import find
from parlay.strategies.spelling import parse
from parlay.types import ParlayError, Strategy, Tokenizer
from parlay.vllm.counting import ProposerCounts
from parlay.vllm.drafting import ChainDrafting
from parlay.vllm.options import ProposerOptions, read_options
from parlay.vllm.rows import Call, Ids, Rows

_FAILURES = 8
"""After this many failed calls in a row, nothing is drafted any more."""

_log = logging.getLogger("vllm.parlay")


class ModelConfig(Protocol):
    """The fields of vLLM's model config that are used here."""

    max_model_len: int
    tokenizer: str | None

    def get_vocab_size(self) -> int: ...


class SpeculativeConfig(Protocol):
    """The field of vLLM's ``speculative_config`` that is used here."""

    num_speculative_tokens: int


class SchedulerConfig(Protocol):
    """The field of vLLM's scheduler config that is used here."""

    max_num_seqs: int


class VllmConfig(Protocol):
    """The fields of vLLM's config that are used here."""

    model_config: ModelConfig
    speculative_config: SpeculativeConfig
    scheduler_config: SchedulerConfig
    additional_config: object


class StepDrafter:
    """Drafts for another engine's texts with one strategy, based on the measured seconds of its steps.

    A draft has at most ``most`` tokens. `step` never raises: a step with an error has no drafts, and after several such
    steps in a row no step has. The constructor raises UsageError for a strategy that can't work here.
    """

    def __init__(
        self,
        options: ProposerOptions,
        model: ModelConfig,
        most: int,
        clock: Callable[[], float] = time.perf_counter,
        *,
        engine: str = "vLLM",
    ) -> None:
        self._most = most
        self._longest = model.max_model_len
        self._clock = clock
        self._cost = MeasuredCost()
        self.counts = ProposerCounts(options.log_seconds)
        self.strategy = _open_strategy(options, model, self._cost, engine)
        self._drafting = ChainDrafting(self.strategy, self._cost, model.get_vocab_size(), clock)
        self._last = 0.0
        """When the last call ended; 0 if the next step can't be timed from it."""
        self._failures = 0

    def step(self, rows: int, read: Callable[[], Call], clear: Callable[[], Sequence[TokenText]]) -> list[list[int]]:
        """Draft for each of ``rows`` rows. ``read`` returns the texts; ``clear`` forgets all texts, and returns
        them."""
        if self._failures >= _FAILURES:
            return [[] for _ in range(rows)]
        try:
            drafts = self._step(read)
        except Exception as error:  # an exception would end the engine
            self._fail(error, clear)
            return [[] for _ in range(rows)]
        self._failures = 0
        return drafts

    def _step(self, read: Callable[[], Call]) -> list[list[int]]:
        began = self._clock()
        call = read()
        for text in call.ended:
            self._drafting.release(text)
        self._drafting.learn(call.observations, began - self._last if self._last and call.decoded else 0.0)
        texts = [text for text in call.texts if text is not None]
        self._drafting.draft(texts, [self._room(text) for text in texts])
        self._last = self._clock()
        self.counts.add(
            self._last,
            calls=1,
            seconds=self._last - began,
            steps=len(call.observations),
            drafted_tokens=sum([len(each.draft) for each in call.observations]),
            accepted_tokens=sum([len(each.verdict.path) for each in call.observations]),
        )
        return [list(text.draft.tree.tokens) if text is not None else [] for text in call.texts]

    def _room(self, text: TokenText) -> int:
        """Return how many tokens may be drafted so that the token after them still fits into the context."""
        return max(0, min(self._most, self._longest - len(text.tokens) - 1))

    def _fail(self, error: Exception, clear: Callable[[], Sequence[TokenText]]) -> None:
        """Count a failed call, and forget all texts, because their states may be wrong."""
        self._failures += 1
        self._last = 0.0
        self.counts.add(self._clock(), failures=1)
        if self._failures == 1:
            _log.warning("drafting failed, so this step is decoded without drafts: %s", error, exc_info=error)
        if self._failures == _FAILURES:
            _log.error(
                "drafting failed %d times in a row, so from now on everything is decoded without drafts", _FAILURES
            )
        try:
            for text in clear():
                self._drafting.release(text)
        except Exception as again:
            _log.debug("a drafter can't forget a text: %s", again)


class Proposer:
    """Drafts inside vLLM with Parlay's drafters and budgets; see `StepDrafter`.

    ``LLM(model, speculative_config={"method": "custom_class", "model": "parlay.vllm.Proposer",
    "num_speculative_tokens": 16}, additional_config={"parlay": {"strategy": "..."}})``; see `ProposerOptions`.

    Drafts are chains of at most ``num_speculative_tokens`` tokens, and may be empty. Raises UsageError, which vLLM
    shows, for options that can't work.
    """

    def __init__(self, vllm_config: VllmConfig, clock: Callable[[], float] = time.perf_counter) -> None:
        options, model = read_options(vllm_config.additional_config), vllm_config.model_config
        self._drafter = StepDrafter(options, model, vllm_config.speculative_config.num_speculative_tokens, clock)
        self._rows = Rows(model.max_model_len, vllm_config.scheduler_config.max_num_seqs, options.share_outputs)
        self.strategy, self.counts = self._drafter.strategy, self._drafter.counts

    def load_model(self, target: object) -> None:
        """Do nothing; vLLM calls this with the target's module."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Sequence[int] | Ids,
        token_ids_cpu: Ids,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Draft for each row of the batch. The arguments are vLLM's: the tokens that the step committed, the texts'
        lengths, and the texts' ids."""

        def read() -> Call:
            return self._rows.read(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)

        return self._drafter.step(len(sampled_token_ids), read, self._rows.clear)


def _open_strategy(options: ProposerOptions, model: ModelConfig, cost: MeasuredCost, engine: str) -> Strategy:
    """Open the strategy. Raises UsageError if it does not exist, or needs more than tokens."""
    spec = parse(options.strategy)
    if any(find(each.name).family == "heads" for each in (spec, *spec.members)):
        raise UsageError(
            f"strategy {spec}: {engine} shows a proposer no hidden states, which draft heads read; export the head "
            f"with parlay export, and use {engine}'s own method for it"
        )
    resources = Resources(model.get_vocab_size(), _refuse_model, tokenizer=_tokenizer(model.tokenizer))
    strategy = StrategyCache(resources, cost).get(spec)
    check_tokens_suffice(strategy, engine)
    return strategy


def _tokenizer(name: str | None) -> Tokenizer | None:
    """Return the target's tokenizer, against which datastores are checked; None if it is not on this machine."""
    try:
        return load_tokenizer(resolve_tokenizer(name)) if name and is_local(name) else None
    except (ParlayError, OSError) as error:
        _log.warning("the tokenizer %s can't be read, so no datastore is checked against it: %s", name, error)
        return None


def _refuse_model(name: str) -> NoReturn:
    raise UsageError(
        f"draft model {name}: inside another engine Parlay loads no models; use its own (vLLM: method draft_model), or "
        "parlay serve --drafter-only and the strategy remote"
    )
