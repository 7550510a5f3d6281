"""Measures how often drafts are right on a user's own requests, by replaying recorded answers or decoding prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from parlay.bench.loops import first_loop
from parlay.bench.plan.strategies import Acceptance
from parlay.bench.prepare import first_ids
from parlay.bench.replay.answers import OUTPUTS, RecordedAnswer, read_answers
from parlay.bench.replay.decode import replay, whole_drafts
from parlay.bench.replay.tokens import RecordedTokens, open_tokens, recorded
from parlay.bench.workloads import Item, Message, read_prompts
from parlay.bench.workloads.files import COMPRESSED, records
from parlay.llm.llm import LLM
from parlay.llm.outputs import CompletionOutput
from parlay.strategies.spelling import StrategySpec
from parlay.text.prompts import TokensPrompt
from parlay.types import Metrics, ParlayError, SamplingParams

_TOKENS = 128

Rates = dict[str, tuple[float, ...]]
"""The probability that the next drafted token is right, by the spelling of a strategy.

A step without a draft counts as a wrong token. The policy does not limit the drafts, so that the probability is the
drafter's own.
"""


@dataclass(frozen=True, slots=True)
class Chances:
    """Acceptance probabilities, their source in words, and notes for the reader."""

    acceptance: Acceptance
    source: str
    note: str = ""

    def beside(self, note: str) -> Chances:
        """Return a copy with one more note."""
        return replace(self, note=f"{self.note} {note}")


def measured(
    strategies: Sequence[StrategySpec],
    traffic: Traffic,
    model: str,
    open_llm: Callable[[], LLM],
    say: Callable[[str], None],
) -> Chances:
    """Measure acceptance probabilities on a user's requests.

    Recorded answers are replayed. Strategies that need the target's states decode the prompts instead. ``model`` has
    weights and a tokenizer on this machine. It may be another model than the planned one, if that has none here.
    """
    rates: Rates = {}
    notes = []
    if traffic.answers:
        say(f"replaying {len(traffic.answers)} recorded answers")
        rates = replayed(strategies, traffic.answers, open_tokens(model))
        notes.append(f"Recorded answers that were replayed, with no model running: {len(traffic.answers)}.")
    rest = [spec for spec in strategies if str(spec) not in rates]
    if rest:
        say(f"measuring acceptance on {len(traffic.prompts)} prompts")
        with open_llm() as llm:
            rates |= decoded(rest, traffic.prompts, llm)
        names = ", ".join(map(str, rest))
        notes.append(f"{model} decoded {len(traffic.prompts)} prompts with {names}.")
    return Chances(Acceptance(by_strategy=rates), f"measured on {traffic.name}", " ".join(notes))


def replayed(strategies: Sequence[StrategySpec], answers: Sequence[RecordedAnswer], tokens: RecordedTokens) -> Rates:
    """Return the rates of those strategies that need only the recorded text. No model runs."""
    texts = [text for text in (recorded(answer, tokens) for answer in answers) if text.prompt and text.output]
    rates: Rates = {}
    for spec in strategies:
        try:
            rates[str(spec)] = (_rate(one.metrics for one in replay(str(spec), texts, tokens)),)
        except (ParlayError, ValueError):  # needs more than the text: see `decoded`
            continue
    return rates


def decoded(strategies: Sequence[StrategySpec], prompts: Sequence[Item], llm: LLM) -> Rates:
    """Return the rates on greedy answers that this model writes, cut where they begin to repeat themselves.

    Drafters copy loops easily, so with loops the drafts for a small model would seem better than they are.
    """
    longest = SamplingParams(temperature=0, max_tokens=_TOKENS)
    requests = [TokensPrompt(prompt_token_ids=first_ids(llm, item)) for item in prompts]
    plain = _decode(llm, "none", requests, [longest] * len(requests))
    cut = [replace(longest, max_tokens=max(first_loop(sample.token_ids), 1)) for sample in plain]
    return {
        str(spec): (_rate(sample.metrics for sample in _decode(llm, str(whole_drafts(spec)), requests, cut)),)
        for spec in strategies
    }


def _decode(
    llm: LLM, strategy: str, prompts: Sequence[TokensPrompt], params: Sequence[SamplingParams]
) -> list[CompletionOutput]:
    outputs = llm.generate(prompts, params, strategy=strategy)
    return [sample for output in outputs for sample in output.outputs]


def _rate(metrics: Iterable[Metrics]) -> float:
    """Return the share of right tokens among drafted tokens up to the first wrong one of each draft."""
    right = tried = 0
    for each in metrics:
        for (proposed, accepted), steps in each.outcomes.items():
            right += steps * accepted
            tried += steps * max(1, min(accepted + 1, proposed))
    return right / max(tried, 1)


PROMPTS = 16
"""Limit on the prompts of a file that are decoded; the first ones are."""
ANSWERS = 200
"""Limit on the recorded answers of a file that are replayed; the first ones are. A replay runs no model."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """The first requests of a file. ``answers`` is empty if the file has no recorded answers."""

    name: str
    prompts: tuple[Item, ...]
    answers: tuple[RecordedAnswer, ...] = ()


def read_traffic(path: Path) -> Traffic:
    """Read a file of prompts, as `read_prompts` does, or of recorded answers, as `read_answers` does.

    Raises ValueError for a file that can't be read, has another format, or holds neither.
    """
    if not _recorded(path):
        return Traffic(str(path), tuple(islice(read_prompts(path), PROMPTS)))
    answers = tuple(islice((each for each in read_answers(path) if each.prompt and each.output), ANSWERS))
    if not answers:
        raise ValueError(f"{path} holds no recorded answer with any text")
    prompts = (Item(id=str(place), messages=(Message("user", each.prompt),)) for place, each in enumerate(answers))
    return Traffic(str(path), tuple(islice(prompts, PROMPTS)), answers)


def _recorded(path: Path) -> bool:
    """Whether the file's first record has an answer. If it does, all other records must have one."""
    if not path.name.endswith((".jsonl", ".json", *COMPRESSED)):
        return False
    _, first = next(records(path), ("", None))
    return isinstance(first, Mapping) and bool({*OUTPUTS, "result"} & first.keys())
