"""Translators of `parlay train` on held-out pairs: chrF and BLEU beside the time of one core, alone and 32 at once.

Times are processor seconds of this process, on one thread, so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path

from benchmarks.commands import RESULTS, one_line_errors
from parlay import LLM, SamplingParams
from parlay.bench.provenance import provenance
from parlay.models.facts import count_parameters
from parlay.train.translation.pairs import divided, read_pairs

AR = "translator"
PARAMS = SamplingParams(temperature=0, max_tokens=100)
TABLE = (
    "| model | strategy | chrF | BLEU | tokens per step | texts of the translator | ms per sentence, 1 at once | "
    "ms per sentence, 32 at once |\n|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True)
class Scored:
    """One model under one strategy. Times are milliseconds of one core for each sentence."""

    model: str
    strategy: str
    parameters: int
    sentences: int
    chrf: float
    bleu: float
    tokens_per_step: float
    same: int
    alone_ms: float
    together_ms: float
    signatures: tuple[str, str]


def cases(models: Path) -> list[tuple[str, str]]:
    """Models by folder, and strategies; those of folders that are there."""
    masks = "denoise:selector=mask-predict"
    drafts = f"canvas-draft:model={models / 'cmlm'},width=1,k=8,min_p=0"
    every = [
        (AR, "none"),
        (AR, "auto"),
        *[(AR, f"{drafts}{more}") for more in (",policy=fixed", "", ",policy=fixed,rule=threshold")],
        *[("cmlm", f"{masks},steps={steps},lengths={lengths}") for steps, lengths in ((1, 1), (4, 1), (10, 1), (4, 3))],
        ("glat", f"{masks},steps=1"),
        ("nat", f"{masks},steps=1"),
        ("ctc", "denoise:selector=ctc"),
        *[("da", f"denoise:selector={name}-path") for name in ("greedy", "lookahead", "viterbi")],
    ]
    there = (models / "cmlm").is_dir()
    return [(name, how) for name, how in every if (models / name).is_dir() and (there or "model=" not in how)]


def scores(texts: Sequence[str], references: Sequence[Sequence[str]]) -> tuple[float, float, tuple[str, str]]:
    """ChrF, BLEU and their signatures, by the package sacrebleu, with all references of a source."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    streams = [list(stream) for stream in zip_longest(*references)]
    chrf, bleu = CHRF(), BLEU()
    found = (chrf.corpus_score(texts, streams).score, bleu.corpus_score(texts, streams).score)
    return (*found, (str(chrf.get_signature()), str(bleu.get_signature())))


def timed(llm: LLM, sources: Sequence[str], strategy: str, at_once: int) -> tuple[list[str], float, float]:
    """Texts, tokens per step, and seconds of processor time for each sentence."""
    texts, tokens, steps = list[str](), 0, 0
    began = time.process_time()
    for first in range(0, len(sources), at_once):
        for output in llm.generate(list(sources[first : first + at_once]), PARAMS, False, strategy=strategy):
            one = output.outputs[0]
            texts.append(one.text)
            tokens, steps = tokens + len(one.token_ids), steps + one.metrics.steps
    return texts, tokens / max(steps, 1), (time.process_time() - began) / len(sources)


def measure(options: argparse.Namespace) -> list[Scored]:
    """Every case on the same sources; the first 40 of them one by one."""
    references: dict[str, list[str]] = {}
    for source, target in divided(read_pairs(options.data))[1]:
        references.setdefault(source, []).append(target)
    sources = list(references)[:: max(1, len(references) // options.sources)][: options.sources]
    found, opened, plain = list[Scored](), dict[str, LLM](), list[str]()
    for name, strategy in cases(options.models):
        folder = options.models / name
        llm = opened.setdefault(name, LLM(str(folder), threads=1, router_memory="off"))
        timed(llm, sources[:8], strategy, 8)  # what is read once is read
        _, per_step, alone = timed(llm, sources[:40], strategy, 1)
        texts, _, together = timed(llm, sources, strategy, 32)
        plain = plain or texts
        same = sum(one == other for one, other in zip(texts, plain, strict=True))
        chrf, bleu, signatures = scores(texts, [references[source] for source in sources])
        label = strategy.replace(str(options.models) + "/", "")
        times = (1000 * alone, 1000 * together)
        size = count_parameters(folder)
        found.append(Scored(name, label, size, len(sources), chrf, bleu, per_step, same, *times, signatures))
        print(found[-1], flush=True)
    return found


def page(rows: Sequence[Scored]) -> str:
    """The table."""
    lines = [
        f"| {row.model} | `{row.strategy}` | {row.chrf:.1f} | {row.bleu:.1f} | {row.tokens_per_step:.2f} "
        f"| {row.same}/{row.sentences} | {row.alone_ms:.1f} | {row.together_ms:.1f} |"
        for row in rows
    ]
    return "\n".join([TABLE, *lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the file of pairs that the translators learned from")
    parser.add_argument("--models", type=Path, required=True, help="folder of models, each named by its recipe")
    parser.add_argument("--sources", type=int, default=300, help="held-out sources")
    parser.add_argument("--out", type=Path, default=RESULTS / "translation.jsonl")
    options = parser.parse_args()
    with one_line_errors("translation"):
        rows = measure(options)
    header = {"provenance": provenance("python -m benchmarks.translation --data FILE --models DIR")}
    options.out.write_text("".join(json.dumps(line) + "\n" for line in (header, *map(asdict, rows))))
    options.out.with_suffix(".md").write_text(page(rows))


if __name__ == "__main__":
    main()
