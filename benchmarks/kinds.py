"""How often a prompt's kind is found: by the rules of `parlay.text.prompt_kind`, and by naive Bayes beside them.

The published sets were looked at by nobody who wrote a rule, and no classifier learns from them. What it learns from is
a file of lines with ``prompt`` and ``kind`` in JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.commands import one_line_errors
from parlay.bench.workloads import Item, load
from parlay.text.prompt_kind import kind_of

KINDS = {
    "spec-bench/writing": "prose",
    "spec-bench/roleplay": "dialogue",
    "spec-bench/reasoning": "maths",
    "spec-bench/math": "maths",
    "spec-bench/math_reasoning": "maths",
    "spec-bench/coding": "code",
    "spec-bench/extraction": "extraction",
    "spec-bench/stem": "prose",
    "spec-bench/humanities": "prose",
    "spec-bench/translation": "translation",
    "spec-bench/summarization": "extraction",
    "spec-bench/qa": "prose",
    "spec-bench/rag": "extraction",
    "editeval": "edit",
    "humaneval": "code",
    "llma-summaries": "extraction",
    "llma-questions": "extraction",
}
"""What the prompts of each published set are taken for. The sets have no lists."""
TRAINED = {"role": "dialogue", "summ": "extraction", "rag": "extraction", "code": "code", "math": "maths"}
TRAINED |= {"reason": "maths", "translate": "translation", "hum": "prose", "write": "prose", "qa": "prose"}
"""What kinds of the file of training prompts stand for; others are left out, unless they are kinds themselves."""
_WORD = re.compile(r"[a-z]+|\d|[^\sa-z\d]")
_MOST = 120  # words of a prompt that count, from its beginning and its end

Labelled = Sequence[tuple[str, str]]


class NaiveBayes:
    """Multinomial, over words and pairs of words, with one count added to each; all kinds are as likely before."""

    def __init__(self, examples: Labelled) -> None:
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)
        for prompt, kind in examples:
            self._counts[kind].update(_words(prompt))
        known = {word for counts in self._counts.values() for word in counts}
        self._totals = {kind: counts.total() + len(known) for kind, counts in self._counts.items()}

    def __call__(self, prompt: str) -> str:
        words = _words(prompt)
        return max(self._counts, key=lambda kind: self._likelihood(kind, words))

    def _likelihood(self, kind: str, words: Sequence[str]) -> float:
        counts, total = self._counts[kind], self._totals[kind]
        return sum(math.log((counts[word] + 1) / total) for word in words)


def _words(prompt: str) -> list[str]:
    words = _WORD.findall(prompt.lower())
    words = words if len(words) <= _MOST else [*words[: _MOST // 2], *words[-_MOST // 2 :]]
    return [*words, *(f"{one} {other}" for one, other in pairwise(words))]


def held_out(data: Path) -> dict[str, Labelled]:
    """By set the prompts, each with what it is taken for."""
    return {each.name: [(_text(item), KINDS[each.name]) for item in each.items] for each in load([*KINDS], data=data)}


def _text(item: Item) -> str:
    return item.prompt or item.messages[-1].content


def trained(path: Path) -> Labelled:
    """Prompts to learn from. Raises ValueError for a line that is none."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    kinds = TRAINED | {kind: kind for kind in KINDS.values()}
    return [(line["prompt"], kinds[line["kind"]]) for line in lines if line["kind"] in kinds]


def report(sets: dict[str, Labelled], ways: dict[str, Callable[[str], str]]) -> str:
    """A line for each set, and what all come to: every set counts once."""
    lines = [f"{'set':28}{'prompts':>8}" + "".join(f"{name:>14}" for name in ways)]
    shares: dict[str, list[float]] = defaultdict(list)
    for name, examples in sets.items():
        found = {way: _share(kind_of_prompt, examples) for way, kind_of_prompt in ways.items()}
        for way, share in found.items():
            shares[way].append(share)
        lines.append(f"{name:28}{len(examples):8}" + "".join(f"{share:14.2f}" for share in found.values()))
    means = "".join(f"{sum(each) / len(each):14.2f}" for each in shares.values())
    taken = ", ".join(f"{name} {_microseconds(way, sets):.0f}" for name, way in ways.items())
    return "\n".join([*lines, f"{'mean over sets':36}{means}", f"microseconds per prompt: {taken}"])


def _share(kind_of_prompt: Callable[[str], str], examples: Labelled) -> float:
    return sum(kind_of_prompt(prompt) == kind for prompt, kind in examples) / len(examples)


def _microseconds(way: Callable[[str], str], sets: dict[str, Labelled]) -> float:
    prompts = [prompt for examples in sets.values() for prompt, _ in examples]
    began = time.perf_counter()
    for prompt in prompts:
        way(prompt)
    return 1e6 * (time.perf_counter() - began) / len(prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder of published prompt sets")
    parser.add_argument("--train", type=Path, metavar="FILE", help="prompts and their kinds, to learn from")
    parser.add_argument("--wrong", action="store_true", help="print what the rules took for something else")
    options = parser.parse_args()
    with one_line_errors("kinds"):
        sets = held_out(options.data)
        ways: dict[str, Callable[[str], str]] = {"rules": kind_of}
        if options.train is not None:
            ways["naive Bayes"] = NaiveBayes(trained(options.train))
        print(report(sets, ways))
    for prompt, kind in [each for examples in sets.values() for each in examples] if options.wrong else []:
        if kind_of(prompt) != kind:
            print(f"{kind} -> {kind_of(prompt)}: {prompt[:110]!r}")


if __name__ == "__main__":
    main()
