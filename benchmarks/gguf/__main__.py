"""Command line: measures accuracy, decoding, forwards and loading of GGUF files, and llama.cpp's on the same files.

parlay pull smollm2-135m
python -m benchmarks.gguf --llama PYTHON --data DIR
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from benchmarks.commands import begin, one_line_errors, open_results, write_page
from benchmarks.gguf import accuracy, bits, files, loading, speed
from benchmarks.gguf.llama import LlamaCpp, started
from benchmarks.gguf.page import DECODING, page
from benchmarks.options import add_run_flags, command_parser
from benchmarks.peers.catalogue import PEERS
from benchmarks.peers.decoder import PeerDecoder
from benchmarks.peers.protocol import Task
from benchmarks.peers.worker import Limits
from parlay.bench import workloads
from parlay.bench.records import Results, System
from parlay.bench.runner import Bench, BenchPlan
from parlay.llm import LLM
from parlay.models.fetch.resolving import resolve
from parlay.system import threads

THREADS = (1, 2)
PLAIN_TOKENS, PLAIN_PROMPTS = 128, 2
COMMAND = "python -m benchmarks.gguf --llama PYTHON --data DIR"

logger = logging.getLogger("benchmarks")


class Run:
    """The options of all parts. ``quick`` measures one file, a few times."""

    def __init__(self, options: argparse.Namespace, results: Results, llama: LlamaCpp) -> None:
        self.options, self.results, self.llama = options, results, llama
        self.quick: bool = options.quick
        self.folder: Path = options.cache / "gguf"
        self.folder.mkdir(parents=True, exist_ok=True)

    def smollm2(self) -> Iterator[Path]:
        """Yield the wanted files of SmolLM2, making each when it is due."""
        for mix in files.MIXES[:1] if self.quick else files.MIXES:
            if self._wanted(f"{files.SMOLLM2}-{mix}"):
                yield files.stored_anew(resolve(files.SMOLLM2), self.folder, mix, self.llama)

    def random(self) -> Iterator[Path]:
        """Yield the wanted files of random weights, making each when it is due."""
        for kind in () if self.quick else files.KINDS:
            if self._wanted(f"{files.RANDOM}-{kind.name}"):
                yield files.random_blocks(self.folder, kind, files.Shape())

    def _wanted(self, name: str) -> bool:
        return not self.options.files or any(part in name for part in self.options.files)


def measure_accuracy(run: Run) -> None:
    """Compare the logits of SmolLM2's published file."""
    if run.options.data is None:
        raise ValueError("accuracy is measured on books: give --data DIR")
    path = resolve(files.SMOLLM2)
    (written,) = workloads.load(["prose"], accuracy.ANSWERS)
    with LLM(str(path)) as llm:
        ids_TN = accuracy.texts(llm, run.options.data, [item.prompt for item in written.items])
    run.results.add(list(accuracy.measure(path, ids_TN[: 2 if run.quick else None], run.llama)))


def prove_bits(run: Run) -> None:
    """Check that every file's logits have the same bits however a text is read."""
    for path in (*run.smollm2(), *run.random()):
        run.results.add(list(bits.measure(path)))


def measure_decoding(run: Run) -> None:
    """Measure plain decoding of every mix of SmolLM2."""
    (peer,) = (peer for peer in PEERS if peer.engine == speed.LLAMA)
    (prose,) = workloads.load(["prose"], PLAIN_PROMPTS)
    for path in run.smollm2():
        for count in THREADS:
            threads.use(count)
            task = Task(model=str(path), draft="", threads=count, longest=512, cache=str(run.folder))
            with ExitStack() as stack:
                llm = stack.enter_context(LLM(str(path)))
                plan = BenchPlan(
                    part=f"{DECODING} {speed.part_of(count)}",
                    model=path.stem,
                    strategies=(),
                    workloads=(prose,),
                    against=(System(speed.LLAMA, "plain"),),
                    rounds=1 if run.quick else 3,
                    max_tokens=PLAIN_TOKENS,
                    keep_loops=True,
                )
                decoder = PeerDecoder(peer, run.options.llama, task, Limits(), stack)
                Bench(llm, plan, run.results, {speed.LLAMA: decoder}).run()


def measure_forwards(run: Run) -> None:
    """Time forwards of every file."""
    passes = (2, 1) if run.quick else (9, 3)
    for path in run.smollm2():
        run.results.add(list(speed.measure(path, run.llama, THREADS, *passes)))
    for path in run.random():
        run.results.add(list(speed.measure(path, run.llama, THREADS, 5, 1)))


def measure_loading(run: Run) -> None:
    """Time the loading of the published file and of the files of random weights."""
    rounds, count = 1 if run.quick else 5, max(THREADS)
    published = resolve(files.SMOLLM2)
    run.results.add([*loading.launches(published, rounds, count), *loading.measure(published, rounds, count)])
    for path in run.random():
        run.results.add(list(loading.measure(path, rounds, count)))


PARTS: Mapping[str, Callable[[Run], None]] = {
    "accuracy": measure_accuracy,
    "bits": prove_bits,
    "decoding": measure_decoding,
    "forwards": measure_forwards,
    "loading": measure_loading,
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command's options."""
    parser = command_parser("gguf", __doc__)
    parser.add_argument(
        "--llama", type=Path, required=True, metavar="PYTHON", help="an interpreter that has llama-cpp-python"
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="the folder that holds books-pd")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=tuple(PARTS), metavar="PART")
    parser.add_argument("--files", nargs="+", metavar="TEXT", help="only files whose names contain one of these")
    add_run_flags(parser)
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, and write the page."""
    options = parse()
    begin(options)
    options.llama = options.llama.absolute()
    with one_line_errors("gguf"), started(options.llama, options.cache / "gguf" / "llama.log") as llama:
        results = open_results(options, "gguf", COMMAND, {"llama_cpp_python": llama.version})
        run = Run(options, results, llama)
        for part in options.only:
            logger.info("%s", part)
            PARTS[part](run)
    write_page(results.path, page(results.header, results.rows))


if __name__ == "__main__":
    main()
