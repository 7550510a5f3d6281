"""Measures plain decoding of many requests at once against vLLM's CPU build: tokens per second, 128 tokens in and out.

Both engines stay loaded, take turns, and compute every prompt anew. Without `--vllm` only Parlay is measured.
"""

from __future__ import annotations

import json
import logging
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.commands import RESULTS, one_line_errors, show_log
from benchmarks.options import add_cache_flag, add_threads_flag, command_parser
from benchmarks.pages import about, table
from benchmarks.peers.catalogue import VLLM
from benchmarks.peers.decoder import surroundings
from benchmarks.setup import FULL, SMOLLM2_BF16, Setup
from parlay.bench.provenance import provenance
from parlay.llm import LLM
from parlay.system import threads
from parlay.text.prompts import TokensPrompt
from parlay.types import SamplingParams

INPUT, OUTPUT = 128, 128
VOCABULARY = 4096
"""Prompts are random tokens below this number."""
GOAL = 1.0
Decode = Callable[[int], float]
"""Decodes a number of requests at once, and returns tokens per second."""


def ours(model: Path) -> Decode:
    """Return a function that decodes with Parlay's Python API, without drafts."""
    llm = LLM(str(model), dtype="bfloat16", strategy="none", max_num_seqs=64)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)

    def decode(count: int) -> float:
        draw = random.Random(count)
        prompts = [
            TokensPrompt(prompt_token_ids=[draw.randrange(5, VOCABULARY) for _ in range(INPUT)]) for _ in range(count)
        ]
        llm.reset_prefix_cache()  # prompts are repeated in every round
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params)
        return sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - begin)

    return decode


@contextmanager
def theirs(python: Path, model: Path, threads: int) -> Iterator[Decode]:
    """Start vLLM in its own environment and process, bound to as many cores, and yield a function that decodes."""
    told = {"model": str(model), "input": INPUT, "output": OUTPUT, "vocabulary": VOCABULARY}
    command = [str(python), str(Path(__file__).with_name("vllm_worker.py")), json.dumps(told)]
    environment = os.environ | surroundings(VLLM, threads) | {"VLLM_CPU_KVCACHE_SPACE": "2"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def answer(start: str) -> str:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(start):
                    return line
            raise RuntimeError(f"{python} ended without an answer: does `import vllm` work there?")

        def decode(count: int) -> float:
            assert process.stdin is not None
            process.stdin.write(f"{count}\n")
            process.stdin.flush()
            took = json.loads(answer("{"))
            return float(took["tokens"] / took["seconds"])

        answer("ready")
        yield decode
        process.stdin.close()


def measure(systems: Mapping[str, Decode], counts: list[int], rounds: int) -> dict[int, dict[str, list[float]]]:
    """Return tokens per second by number of requests and system. The systems take turns in every round."""
    rates: dict[int, dict[str, list[float]]] = {count: {name: [] for name in systems} for count in counts}
    for decode in systems.values():
        decode(min(counts))  # warm
    for _ in range(rounds):
        for count in counts:
            for name, decode in systems.items():
                rates[count][name].append(decode(count))
                logging.info("%s at %d: %.0f tokens/s", name, count, rates[count][name][-1])
    return rates


def rows(rates: dict[int, dict[str, list[float]]]) -> Iterator[tuple[str, ...]]:
    """Yield table rows with medians, and the median of the ratios within rounds."""
    for count, by_name in rates.items():
        ours_, *rest = by_name.values()
        ratio = "-"
        if rest:
            ratios = [one / other for one, other in zip(ours_, rest[0], strict=True)]
            ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        yield (
            str(count),
            *(f"{statistics.median(each):.0f}" for each in by_name.values()),
            *(["-"] * (not rest)),
            ratio,
        )


@one_line_errors("serving.batch")
def main() -> None:
    """Run the command."""
    parser = command_parser("serving.batch", __doc__)
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="the Python of an environment with vllm-cpu")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], metavar="N")
    parser.add_argument("--rounds", type=int, default=3)
    add_threads_flag(parser)
    add_cache_flag(parser)
    parser.add_argument("--out", type=Path, default=RESULTS / "batch.jsonl", metavar="FILE")
    options = parser.parse_args()
    show_log()
    threads.use(options.threads)
    model = Setup(data=None, cache=options.cache, scale=FULL).directory(SMOLLM2_BF16)
    systems: dict[str, Decode] = {"parlay": ours(model)}
    record = provenance(" ".join(["python -m benchmarks.serving.batch", *(["--vllm PYTHON"] if options.vllm else [])]))
    if options.vllm:
        with theirs(options.vllm, model, options.threads) as decode:
            rates = measure(systems | {"vllm": decode}, options.concurrency, options.rounds)
    else:
        rates = measure(systems, options.concurrency, options.rounds)
    lines = [record, *({"requests": count, "tokens_per_second": rates[count]} for count in rates)]
    options.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    head = ("requests at once", "Parlay, tokens/s", "vLLM, tokens/s", f"ratio (goal {GOAL})")
    title = ["# Plain decoding of many requests", "", *(__doc__ or "").strip().splitlines(), ""]
    text = "\n".join([*title, about(record), "", *table(head, [list(row) for row in rows(rates)])])
    options.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
