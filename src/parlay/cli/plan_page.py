"""The page of `parlay plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from parlay.system.terminal import aligned

if TYPE_CHECKING:
    from parlay.bench.plan.acceptance import Chances
    from parlay.bench.plan.report import Memory, PlanCase
    from parlay.cost.roofline import ModelShape

_EVERY = "all tried"


def header(model: str, target: ModelShape, weights: str, source: str) -> str:
    """The model, and what predictions are based on."""
    bits = 8 * target.weight_bytes
    size = f"{target.parameters / 1e6:,.0f} million parameters in {weights} ({bits:.3g} bits)"
    return f"{model}: {size}. Modelled for {source}."


def tables(case: PlanCase) -> str:
    """The case's tables: whether it fits, verification by rows, and strategies."""
    prefill = f"prefill {case.prefill_seconds:.3f} s" if case.context else "no prefill"
    plain = f"plain decoding {case.plain_tokens_per_second:,.1f} tokens/s"
    title = f"context {case.context:,}, batch {case.batch}: {prefill}, {plain}"
    fetched = any(verify.fetched for verify in case.verifies)
    verifies = [["rows", "milliseconds", "times one row", *(["MB fetched"] if fetched else [])]] + [
        [
            str(verify.rows),
            f"{1000 * verify.seconds:.2f}",
            f"{verify.ratio:.2f}",
            *([f"{verify.fetched / 1e6:,.0f}"] if fetched else []),
        ]
        for verify in case.verifies
    ]
    body = [*_offers(case)] if case.offers else [*_kinds(case)]
    return "\n".join([title, _memory(case.memory), *_indented(verifies), "", *body])


def _memory(memory: Memory) -> str:
    from parlay.bench.plan.report import USABLE
    from parlay.bench.plan.weights import smaller_types

    way = "copied from the host's memory" if memory.from_host else "read from disk"
    streamed = f" (and {memory.streamed / 1e9:,.1f} GB {way} in a forward of one row)" if memory.streamed else ""
    draft = f", draft model {memory.draft / 1e9:,.1f} GB" if memory.draft else ""
    need = f"weights {memory.weights / 1e9:,.1f} GB{streamed}{draft} and cache {memory.cache / 1e9:,.1f} GB"
    if memory.device is None:
        return f"{need}; the device's memory is not known"
    have = f"{memory.device / 1e9:,.0f} GB of memory"
    if memory.fits:
        return f"{need} fit into {have}"
    room = USABLE * memory.device - memory.cache - memory.draft
    each = memory.weights / memory.parameters
    fitting = [kind.name for kind in smaller_types(room / memory.parameters) if kind.bytes < each]
    remedy = f"--quantize {fitting[0]} would fit" if fitting else "take a smaller model, context or batch"
    remedy += "" if memory.streamed else "; with --memory weights=SIZE layers come from disk, or from a GPU's host"
    return f"{need} DO NOT FIT into {have}, of which {USABLE:.0%} can be used: {remedy}"


def _offers(case: PlanCase) -> list[str]:
    """Strategies with the given or measured acceptance."""
    rows = [["strategy", "nodes", "tokens a step", "step ms", "tokens/s", "times plain", "pays below batch"]] + [
        [
            offer.speed.name,
            str(offer.speed.nodes),
            f"{offer.speed.tokens_per_step:.2f}",
            f"{1000 * offer.speed.step_seconds:.2f}",
            f"{offer.speed.tokens_per_second:,.1f}",
            f"{offer.gain:.2f}",
            "" if offer.speed.name == "none" else _EVERY if offer.pays_below is None else str(offer.pays_below),
        ]
        for offer in case.offers
    ]
    return [*_indented(rows), f"pick: {case.pick}"]


def _kinds(case: PlanCase) -> list[str]:
    """Speed-up by kind of work, with the range over texts."""
    names = list(dict.fromkeys(each.strategy for each in case.kinds))
    cells = {(each.kind, each.strategy): _range(each.low, each.high) for each in case.kinds}
    picks = case.picks or {}
    rows = [["times plain, by kind of work", *names, "pick"]]
    rows += [[kind, *(cells.get((kind, name), "-") for name in names), picks[kind]] for kind in picks]
    return [*_indented(rows), *_break_even(case)]


def _break_even(case: PlanCase) -> list[str]:
    return [
        f"  {name}: not measured; drafts pay where a token is right with a chance of {chance:.2f} or more"
        if chance is not None
        else f"  {name}: not measured; drafts never pay here"
        for name, chance in (case.break_even or {}).items()
    ]


def _range(low: float, high: float) -> str:
    one, other = f"{low:.2f}", f"{high:.2f}"
    return one if one == other else f"{one}-{other}"


def by_kind_notes(cases: Sequence[PlanCase], heads: Mapping[str, str]) -> str:
    """A note on what the ranges are based on; ``heads`` are the names of the model's heads on this machine, by
    method."""
    from parlay.bench.plan.report import BETTER

    texts = {text: None for each in cases[:1] for kind in each.kinds for text in kind.texts}
    sources = ", ".join(text for text in texts if "Spec-Bench" not in text)
    return (
        "Ranges are over texts on which tokens per step were measured (benchmarks/results): for what copies, recorded "
        f"answers of larger models{sources and f' ({sources})'}; for draft models, Qwen2.5-Coder-1.5B with its "
        "0.5B on Spec-Bench; else, and for heads, SmolLM2-135M there. Other models, heads and texts differ: --prompts "
        "FILE measures your own, --acceptance says it by hand. The pick is the default strategy, unless another is "
        f"{BETTER - 1:.0%} faster on texts on which both were measured. {_heads_note(cases, heads)}A dash: not "
        "measured on such texts."
    )


def _heads_note(cases: Sequence[PlanCase], heads: Mapping[str, str]) -> str:
    """Say which of the methods shown have a head for the model; empty if no method needs one."""
    from parlay.bench.plan.heads import HEADS

    names = {each.strategy.partition(":")[0] for case in cases for each in case.kinds}
    have = [f"{name} counts with the head {heads[name]}, which is on this machine" for name in heads if name in names]
    lack = [name for name in HEADS if name in names and name not in heads]
    if lack:
        have.append(f"For {' and '.join(lack)} a head must be trained first, so it is not a pick")
    return "".join(f"{each}. " for each in have)


def chances_note(chances: Chances) -> str:
    """A note on where the acceptance comes from."""
    acceptance = chances.acceptance
    rates = {**({"all" if not acceptance.by_strategy else "others": acceptance.default} if acceptance.default else {})}
    figures = [
        f"{name} {'+'.join(f'{rate:.2f}' for rate in ranks)}"
        for name, ranks in {**acceptance.by_strategy, **rates}.items()
    ]
    known = f"Chance that a drafted token is right, {chances.source}: {', '.join(figures) or 'none'}."
    below = (
        f"Pays below batch: at so many sequences whole drafts are no faster than none; {_EVERY}: up to 256 they are."
    )
    return " ".join(filter(None, [known, chances.note, below]))


def _indented(rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"  {line}" for line in aligned(rows)]
