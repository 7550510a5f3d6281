"""Measures translators of `parlay train` on held-out pairs: chrF, BLEU and CPU time, one and 32 sentences at once.

Times are CPU seconds of this process on one thread, so other work on the machine matters little. All cases take turns,
and each time is the median of its turns. A second table has only sources of many words.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from benchmarks.commands import RESULTS, one_line_errors
from benchmarks.options import command_parser
from parlay import LLM, SamplingParams
from parlay.bench.provenance import provenance
from parlay.models.facts import count_parameters
from parlay.options import LoadOptions
from parlay.train.translation.pairs import divided, read_pairs

AR = "translator"
DEEP, VERIFIER, LARGE = "deep", "verifier", "large"
"""The verifier is the deep model after further training on its own translations; the large one is deeper still."""
AHEAD = 7
"""Drafted tokens per step. With the token before them they are eight rows, which cost little more than four."""
PARAMS = SamplingParams(temperature=0, max_tokens=100)
TABLE = (
    "| model | strategy | chrF | BLEU | tokens per step | texts of the same model | ms per sentence, 1 at once | "
    "ms per sentence, 32 at once |\n|---|---|---|---|---|---|---|---|"
)
LONG = 15
"""The least number of words of a source in the second table."""
LOAD = LoadOptions(threads=1, draft_quantize="int8")


@dataclass(frozen=True, slots=True)
class Scored:
    """One model with one strategy. Times are milliseconds of one core per sentence.

    ``same`` counts texts equal to those of the same model with its first strategy. ``words`` is the least length of a
    source.
    """

    model: str
    strategy: str
    parameters: int
    words: int
    sentences: int
    chrf: float
    bleu: float
    tokens_per_step: float
    same: int
    alone_ms: float
    together_ms: float
    signatures: tuple[str, str]


def cases(models: Path) -> list[tuple[str, str]]:
    """Return models by folder, with their strategies. Models whose folder is missing are left out."""
    masks = "denoise:selector=mask-predict"
    drafts = f"canvas-draft:model={models / 'gad'}"
    every = [
        (AR, "none"),
        ("deep-shallow", "none"),
        *[("cmlm", f"{masks},steps={steps},lengths={lengths}") for steps, lengths in ((1, 1), (4, 1), (10, 1), (4, 3))],
        ("glat", f"{masks},steps=1"),
        *[("nat", f"{masks},steps=1,lengths={lengths}") for lengths in (1, 5)],
        ("ctc", "denoise:selector=ctc"),
        *[("da", f"denoise:selector={name}-path") for name in ("greedy", "lookahead", "viterbi")],
        *[("gad", strategy) for strategy in ("none", f"set-block:policy=fixed,k={AHEAD},width=1")],
        (DEEP, "none"),
        *[case for verifier in (VERIFIER, LARGE) for case in verified(verifier, drafts)],
    ]
    there = (models / "gad").is_dir()
    return [(name, how) for name, how in every if (models / name).is_dir() and (there or "model=" not in how)]


def verified(verifier: str, drafts: str) -> list[tuple[str, str]]:
    """Return the cases of a verifier: plain decoding, and aggressive decoding with chains, trees, the policy's
    drafts and GAD++."""
    fixed, chain, tree = f"policy=fixed,k={AHEAD}", f"{drafts},width=1,min_p=0.05", f"{drafts},width=3,min_p=0.08"
    drafted = (f"{chain},{fixed}", f"{tree},{fixed}", f"{tree},k={AHEAD}", f"{chain},{fixed},rule=threshold")
    return [(verifier, how) for how in ("none", *drafted)]


def scores(texts: Sequence[str], references: Sequence[Sequence[str]]) -> tuple[float, float, tuple[str, str]]:
    """Return chrF, BLEU and their signatures by the package sacrebleu, with all references of a source."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    streams = [list(stream) for stream in zip_longest(*references)]
    chrf, bleu = CHRF(), BLEU()
    found = (chrf.corpus_score(texts, streams).score, bleu.corpus_score(texts, streams).score)
    return (*found, (str(chrf.get_signature()), str(bleu.get_signature())))


class Written(NamedTuple):
    """Texts, tokens per step, and milliseconds of CPU time per sentence."""

    texts: list[str]
    per_step: float
    ms: float


def written(llm: LLM, sources: Sequence[str], strategy: str, at_once: int) -> Written:
    """Translate sources, ``at_once`` at a time. The prefix cache is cleared first, because each source is repeated."""
    texts, tokens, steps = list[str](), 0, 0
    llm.reset_prefix_cache()
    began = time.process_time()
    for first in range(0, len(sources), at_once):
        for output in llm.generate(list(sources[first : first + at_once]), PARAMS, False, strategy=strategy):
            one = output.outputs[0]
            texts.append(one.text)
            tokens, steps = tokens + len(one.token_ids), steps + one.metrics.steps
    return Written(texts, tokens / max(steps, 1), 1000 * (time.process_time() - began) / len(sources))


class Case(NamedTuple):
    """A model with a strategy, and its results in each turn, one sentence and 32 at once."""

    name: str
    strategy: str
    alone: Sequence[Written]
    together: Sequence[Written]

    def scored(self, models: Path, plain: Sequence[str], references: Mapping[str, Sequence[str]], words: int) -> Scored:
        """Return the table row. ``plain``: the texts of the same model with its first strategy."""
        texts = self.together[0].texts
        chrf, bleu, signatures = scores(texts, list(references.values()))
        return Scored(
            model=self.name,
            strategy=self.strategy.replace(f"{models}/", ""),
            parameters=count_parameters(models / self.name),
            words=words,
            sentences=len(texts),
            chrf=chrf,
            bleu=bleu,
            tokens_per_step=self.alone[0].per_step,
            same=sum(one == other for one, other in zip(texts, plain, strict=True)),
            alone_ms=statistics.median(each.ms for each in self.alone),
            together_ms=statistics.median(each.ms for each in self.together),
            signatures=signatures,
        )


Turns = defaultdict[tuple[str, str], list[Written]]
"""The results of each case, by turn."""


def measure(options: argparse.Namespace, words: int) -> list[Scored]:
    """Measure every case on the same sources of at least ``words`` words."""
    references: dict[str, list[str]] = {}
    for source, target in divided(read_pairs(options.data))[1]:
        if len(source.split()) >= words:
            references.setdefault(source, []).append(target)
    sources = list(references)[:: max(1, len(references) // options.sources)][: options.sources]
    chosen = {source: references[source] for source in sources}
    every = cases(options.models)
    names = dict.fromkeys(name for name, _ in every)
    opened = {name: LLM(str(options.models / name), load=LOAD, router_memory="off") for name in names}
    alone, together = Turns(list), Turns(list)
    for turn in range(options.turns + 1):
        for case in every:
            name, strategy = case
            llm = opened[name]
            if turn == 0:  # warms up: reads the weights
                written(llm, sources[:8], strategy, 8)
                continue
            alone[case].append(written(llm, sources, strategy, 1))
            together[case].append(written(llm, sources, strategy, 32))
    plain: dict[str, list[str]] = {}
    for case in every:
        plain.setdefault(case[0], together[case][0].texts)
    found = [Case(*case, alone[case], together[case]) for case in every]
    return [case.scored(options.models, plain[case.name], chosen, words) for case in found]


def page(rows: Sequence[Scored]) -> str:
    """Write a table of the rows."""
    lines = [
        f"| {row.model} | `{row.strategy}` | {row.chrf:.1f} | {row.bleu:.1f} | {row.tokens_per_step:.2f} "
        f"| {row.same}/{row.sentences} | {row.alone_ms:.1f} | {row.together_ms:.1f} |"
        for row in rows
    ]
    return "\n".join([TABLE, *lines, ""])


def main() -> None:
    parser = command_parser("translation", __doc__)
    parser.add_argument("--data", type=Path, required=True, help="the file of pairs that the translators learned from")
    parser.add_argument("--models", type=Path, required=True, help="folder of models, each named by its recipe")
    parser.add_argument("--sources", type=int, default=300, help="held-out sources")
    parser.add_argument("--turns", type=int, default=3, help="how often each case is timed")
    parser.add_argument("--out", type=Path, default=RESULTS / "translation.jsonl")
    options = parser.parse_args()
    with one_line_errors("translation"):
        both = [measure(options, words) for words in (1, LONG)]
    header = {"provenance": provenance("python -m benchmarks.translation --data FILE --models DIR")}
    rows = [asdict(row) for table in both for row in table]
    options.out.write_text("".join(json.dumps(line) + "\n" for line in (header, *rows)))
    options.out.with_suffix(".md").write_text("\n".join(page(table) for table in both))


if __name__ == "__main__":
    main()
