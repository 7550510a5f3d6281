"""Measures how often a target with fewer bits or keys predicts its own text, and the CPU time of such drafts.

    python -m benchmarks.self_drafts --model MODEL --data DIR --texts meetings
    python -m benchmarks.self_drafts --model MODEL --data DIR --texts prompts --strategies self-draft:bits=4

Each text is answered plainly, then with each strategy, which must write the same text. Times are CPU time of one
thread, on which other work counts little, after the prompt was read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import zstandard

from benchmarks.commands import RESULTS, one_line_errors
from benchmarks.options import command_parser
from benchmarks.pages import about, table
from parlay import LLM, RequestOutput, SamplingParams
from parlay.bench.provenance import provenance

FIXED = "k=4,policy=fixed,min_p=0"
"""Drafts are always chains of four tokens, whatever they cost, so strategies differ only in the form of their
drafts."""
FORMS = ("window=512,sinks=0", "window=256,sinks=0,keys=256", "window=512", "window=1024", "window=512,keys=512")
KINDS = ("writing", "reasoning", "math", "coding", "qa", "math_reasoning", "translation")


@dataclass(frozen=True, slots=True)
class Answer:
    """One text with one strategy. ``plain_seconds`` and ``seconds`` are the CPU times of plain decoding and of the
    strategy."""

    text: str
    strategy: str
    prompt_tokens: int
    tokens: int
    steps: int
    drafted: int
    accepted: int
    plain_seconds: float
    seconds: float


def meetings(data: Path, count: int, letters: int) -> Iterator[tuple[str, str]]:
    """Yield the beginnings of ``count`` meetings of QMSum, each with a question about it."""
    file = data / "qmsum" / "val.jsonl.zst"
    with file.open("rb") as packed, zstandard.open(packed, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in islice(lines, count)]
    for number, record in enumerate(records):
        said = "\n".join(f"{turn['speaker']}: {turn['content']}" for turn in record["meeting_transcripts"])
        yield f"meeting {number}", f"{said[:letters]}\n\n{record['specific_query_list'][-1]['query']}"


def prompts(data: Path, count: int) -> Iterator[tuple[str, str]]:
    """Yield ``count`` prompts of Spec-Bench, the first ones of each kind in turn."""
    lines = (data / "spec-bench" / "question.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        own = [record["turns"][0] for record in records if record["category"] == kind]
        yield f"{kind} {number // len(KINDS)}", own[number // len(KINDS)]


def answers(llm: LLM, name: str, text: str, strategies: Sequence[str], params: SamplingParams) -> Iterator[Answer]:
    """Yield the answer with each strategy. Raises AssertionError if a strategy writes another answer."""
    llm.chat([[{"role": "user", "content": text}]], SamplingParams(temperature=0, max_tokens=1), strategy="none")
    plain, plain_seconds = timed(llm, text, "none", params)
    for strategy in strategies:
        out, seconds = timed(llm, text, strategy, params)
        assert out.chosen.token_ids == plain.chosen.token_ids, f"{strategy} wrote another answer to {name}"
        metrics = out.metrics
        counts = metrics.prompt_tokens, metrics.completion_tokens, metrics.steps
        yield Answer(name, strategy, *counts, metrics.draft_tokens, metrics.accepted_tokens, plain_seconds, seconds)


def timed(llm: LLM, text: str, strategy: str, params: SamplingParams) -> tuple[RequestOutput, float]:
    """Return the answer, and the CPU time that it took."""
    began = time.process_time()
    (out,) = llm.chat([[{"role": "user", "content": text}]], params, strategy=strategy)
    return out, time.process_time() - began


def by_strategy(found: Sequence[Answer]) -> Iterator[tuple[str, ...]]:
    """Yield a table row for each strategy."""
    for strategy in dict.fromkeys(one.strategy for one in found):
        own = [one for one in found if one.strategy == strategy]
        drafted, accepted = sum(one.drafted for one in own), sum(one.accepted for one in own)
        tokens, steps = sum(one.tokens for one in own), sum(one.steps for one in own)
        speed = sum(one.plain_seconds for one in own) / sum(one.seconds for one in own)
        share = f"{accepted / drafted:.3f}" if drafted else "-"
        yield strategy, str(len(own)), f"{accepted} / {drafted}", share, f"{tokens / steps:.2f}", f"{speed:.2f}"


@one_line_errors("self_drafts")
def main() -> None:
    """Run the command."""
    parser = command_parser("self_drafts", __doc__)
    parser.add_argument("--model", required=True, metavar="MODEL")
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="folder that holds qmsum and spec-bench"
    )
    parser.add_argument("--texts", choices=("meetings", "prompts"), required=True)
    parser.add_argument("--count", type=int, default=8, metavar="N", help="how many texts")
    parser.add_argument(
        "--letters",
        type=int,
        default=9000,
        metavar="N",
        help="length of a meeting's beginning, in letters (default: 9000)",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=32, metavar="N", help="longest answer in tokens (default: 32)"
    )
    parser.add_argument("--strategies", nargs="+", default=[f"self-draft:{form},{FIXED}" for form in FORMS])
    parser.add_argument("--out", type=Path, default=RESULTS / "self-drafts.json", metavar="FILE")
    options = parser.parse_args()
    drawn = prompts(options.data, options.count)
    if options.texts == "meetings":
        drawn = meetings(options.data, options.count, options.letters)
    params, found = SamplingParams(temperature=0, max_tokens=options.max_tokens), list[Answer]()
    with LLM(options.model, strategy="none", router_memory="off") as llm:
        for strategy in options.strategies:  # the first use packs weights
            timed(llm, "Hello.", strategy, SamplingParams(temperature=0, max_tokens=8))
        for name, text in drawn:
            for one in answers(llm, name, text, options.strategies, params):
                found.append(one)
                print(one, flush=True)
    asked = f"--texts {options.texts} --count {options.count} --letters {options.letters}"
    what = f"--model {Path(options.model).name} {asked} --max-tokens {options.max_tokens}"
    record = provenance(f"python -m benchmarks.self_drafts {what} --strategies {' '.join(options.strategies)}")
    options.out.write_text(json.dumps({"origin": record, "rows": [asdict(one) for one in found]}, indent=1) + "\n")
    head = ("strategy", "texts", "right / drafted", "share", "tokens per step", "plain over its processor time")
    title = ["# Drafts of a target's own weights and keys", "", f"{Path(options.model).name}. {about(record)}", ""]
    page = "\n".join([*title, *table(head, list(by_strategy(found)))])
    options.out.with_suffix(".md").write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
