"""What is measured on one model: the default strategy by kind of text, right predictions, and other engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from parlay.bench import workloads
from parlay.bench.prepare import first_ids, lasting
from parlay.bench.records import PLAIN, System
from parlay.bench.runner import BenchPlan
from parlay.bench.workloads import Item, Workload
from parlay.llm import LLM
from parlay.llm.outputs import CompletionOutput
from parlay.strategies.entry import DEFAULT_STRATEGY
from parlay.types import SamplingParams

ENGINES, KINDS, FORETOLD = "engines", "kinds", "foretold"
"""The parts: all engines on prose, the default strategy by kind of text, and right predictions."""
PEER_MODE = "plain"
PROSE, EDIT = "prose", "edit"
PREDICTION = "prediction"
SHORT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much to measure. In a round everyone writes a text again and again for ``seconds`` in all."""

    kinds: tuple[str, ...] = ("copy", EDIT, "calls", "code", PROSE)
    prompts: int = 3
    seconds: float = 4.0
    busy: tuple[int, ...] = (0, 1, 2, 4)
    rounds: int = 5


FULL = Scale()
QUICK = Scale(kinds=("copy", EDIT), prompts=2, seconds=2.0, busy=(0, 2), rounds=3)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of an answer: on an idle machine a fraction of a second's, for some engines become very slow beside busy
    processes; enough for the default strategy to show what it wins."""

    engines: int
    kinds: int

    @staticmethod
    def of(tokens_per_second: float) -> Lengths:
        return Lengths(
            min(max(int(0.06 * tokens_per_second), 16), 256), min(max(int(0.4 * tokens_per_second), 64), 160)
        )


def plans(llm: LLM, model: str, scale: Scale, peers: Sequence[str]) -> list[BenchPlan]:
    """All that is measured on one model, each in the same rounds."""
    (prose,) = workloads.load([PROSE], 1)
    lengths = Lengths.of(plain_speed(llm, prose.items[0]))
    kinds = {each.name: lasting(llm, each, scale.prompts, lengths.kinds) for each in workloads.load(scale.kinds)}
    common = BenchPlan(
        model=model, strategies=(), workloads=(), busy=scale.busy, rounds=scale.rounds, max_tokens=lengths.kinds
    )
    return [
        replace(
            common,
            part=ENGINES,
            workloads=(prose,),
            against=tuple(System(peer, PEER_MODE) for peer in peers),
            max_tokens=lengths.engines,
            keep_loops=True,  # they favour nobody here, and all texts have one length
            seconds=scale.seconds,
        ),
        replace(
            common,
            part=KINDS,
            workloads=tuple(kinds.values()),
            strategies=(DEFAULT_STRATEGY,),
            seconds=scale.seconds / 2,
        ),
        replace(
            common,
            part=FORETOLD,
            workloads=(foretold(llm, kinds[EDIT], lengths.kinds),),
            strategies=(PREDICTION,),
            seconds=scale.seconds / 2,
        ),
    ]


def foretold(llm: LLM, edits: Workload, most: int) -> Workload:
    """Edits, each with a prediction that is right in every letter: the text that plain decoding writes."""
    items = tuple(replace(item, prediction=plainly(llm, item, most).text) for item in edits.items)
    return replace(edits, items=items)


def plain_speed(llm: LLM, item: Item) -> float:
    """Tokens per second of plain decoding now: of the second of two short texts."""
    return [plainly(llm, item, SHORT).metrics.tokens_per_second for _ in range(2)][1]


def plainly(llm: LLM, item: Item, most: int) -> CompletionOutput:
    """What plain decoding writes."""
    params = SamplingParams(temperature=0, max_tokens=most)
    (output,) = llm.generate({"prompt_token_ids": first_ids(llm, item)}, params, strategy=PLAIN, store=False)
    return output.outputs[0]
