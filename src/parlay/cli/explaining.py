"""The router's choices for a sample over time, with their reasons, as `parlay generate --explain` prints them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from parlay.types import Metrics, Routed, Stretch

_MOST = 16  # most lines of a request's life
_BAR = 24  # characters of the longest bar
_MATCH = 2  # tokens before a token that must match for it to count as repeated text


def explained(metrics: Metrics, going_on: Sequence[bool]) -> str:
    """Describe each drafter in a line, expected and actual, then the number of steps by reason of choice, then the
    request's life: a line per stretch of steps, with a bar for its tokens per step.

    ``going_on`` says for each token whether it continues earlier text, which copying drafters can guess.
    """
    record = metrics.router
    if record is None:
        return f"{metrics.strategy} has one drafter or none: there was nothing to choose"
    steps = ", ".join(f"{count} {reason}" for reason, count in _most_first(record.reasons))
    kind = [f"taken for a request of the kind: {record.kind}"] if record.kind else []
    power = [f"power: {record.power}"] if record.power else []
    return "\n".join(
        [*kind, *power, *map(_line, record.drafters), f"steps: {steps or 'none'}", *_life(record.life, going_on)]
    )


def _line(each: Routed) -> str:
    trials = f", {each.trials} of them trials" if each.trials else ""
    return (
        f"{each.drafter}: asked in {each.asked} steps, verified in {each.verified}{trials}; "
        f"{each.accepted} tokens accepted ({each.expected:.1f} expected); "
        f"{1000 * each.seconds:.1f} ms ({1000 * each.expected_seconds:.1f} expected)"
    )


def _life(life: Sequence[Stretch], going_on: Sequence[bool]) -> Iterator[str]:
    if not life:
        return
    yield "tokens per step (expected), and where they came from or why nothing was drafted; overlap with earlier text:"
    parts = [_joined(life[at : at + 2]) for at in range(0, len(life), 2)] if len(life) > _MOST else life
    most = max(each.tokens / each.steps for each in parts)
    begin, written = 1, 0
    for each in parts:
        rate = each.tokens / each.steps
        choices = ", ".join(f"{count} {choice}" for choice, count in _most_first(each.choices))
        steps, bar = f"{begin}-{begin + each.steps - 1}", "#" * max(1, round(_BAR * rate / most))
        own = going_on[written : written + each.tokens]
        overlap = sum(own) / max(1, len(own))
        yield f"  {steps:>9}  {rate:5.2f} ({each.expected / each.steps:5.2f})  {bar:{_BAR}}  {choices}; {overlap:.0%}"
        begin, written = begin + each.steps, written + each.tokens


def _most_first(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda each: -each[1])


def _joined(parts: Sequence[Stretch]) -> Stretch:
    choices = sum((Counter(each.choices) for each in parts), Counter[str]())
    steps, tokens = sum(each.steps for each in parts), sum(each.tokens for each in parts)
    return Stretch(steps, tokens, sum(each.expected for each in parts), choices)


def going_on(output: Sequence[int], prompt: Sequence[int], references: Sequence[Sequence[int]] = ()) -> list[bool]:
    """For each token of the output, whether it and the two before it occurred in sequence earlier.

    Earlier text is a reference, the prompt, or the output so far.
    """
    seen = {run for text in (*references, prompt) for run in _runs(text)}
    repeated: list[bool] = []
    for run in _runs([*prompt[-_MATCH:], *output]):
        repeated.append(run in seen)
        seen.add(run)
    return [False] * (len(output) - len(repeated)) + repeated  # the first tokens after a prompt of fewer than two


def _runs(text: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Each token from the third on, with the two before it."""
    return zip(*(text[start:] for start in range(_MATCH + 1)), strict=False)
