"""Tests and times the kernels on this machine's GPU, and writes one page to send to the project.

The project has measured no decoding on a GPU, so even a page with failures helps. The page reports parts that fail, and
the others go on. The command takes about ten minutes, and longer if it must fetch the model.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.commands import one_line_errors
from benchmarks.options import command_parser
from parlay.bench import workloads
from parlay.bench.provenance import ROOT, provenance
from parlay.bench.records import Results
from parlay.bench.runner import Bench, BenchPlan
from parlay.bench.summary import summarise
from parlay.bench.table import table
from parlay.llm import LLM
from parlay.models.compiled.weights import Packed
from parlay.models.config import DecoderConfig
from parlay.models.forward import Forward
from parlay.models.native import NativeRunner
from parlay.models.torch_ops.eager import EagerForward
from parlay.models.torch_ops.step_graphs import CudaRecorder
from parlay.models.weights.fused import Operand
from parlay.models.weights.shapes import weight_shapes
from parlay.options import LoadOptions
from parlay.strategies.entry import DEFAULT_STRATEGY
from parlay.testing.conformance import KitLength, check_strategy, native_stage
from parlay.types import Segment, trees

MODEL = "Qwen/Qwen2.5-Coder-1.5B-Instruct"
PAGE = ROOT / "build" / "gpu.md"
TESTS = ("tests/models/triton_ops", "tests/models/graphs", "tests/sampling/test_fused_walk.py")
KIT = ("none", "prompt-lookup", "draft-model", DEFAULT_STRATEGY)
KIT_LENGTH = KitLength(tokens=32, draws=500)
KIT_CHECKS = ("greedy", "sampled", "mixed", "forks", "chunks", "preemption")
KINDS = ("edit", "copy", "code", "maths", "prose")
PUBLISHED = ("spec-bench", "editeval", "humaneval", "bfcl-simple")
"""The sets that hold the 16 kinds of question of the README's table."""
WAYS = {"graphs": (True, True), "Triton": (True, False), "torch": (False, False)}
"""The ways to run forwards: whether Triton's kernels compute attention, and whether steps are CUDA graphs."""
SHAPE = DecoderConfig(
    architecture="Qwen2ForCausalLM",
    vocab_size=151_936,
    hidden_size=1536,
    intermediate_size=8960,
    num_layers=28,
    num_heads=12,
    num_kv_heads=2,
    head_dim=128,
    rms_norm_eps=1e-6,
    max_context=8192,
    tie_embeddings=True,
    qkv_bias=True,
)
"""The model whose forwards are timed: Qwen2.5-1.5B's shape with random weights."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the page: its title, and a function that returns its text and may raise."""

    title: str
    find: Callable[[], str]


def page(parts: Sequence[Part]) -> Iterator[str]:
    """Yield the page's lines, part by part. If a part raises an error, the error is its text."""
    yield "# Parlay on a GPU"
    for part in parts:
        began = time.perf_counter()
        warned = _Warnings()
        logging.getLogger("parlay").addHandler(warned)
        try:
            text = part.find()
        except Exception as error:  # anything may fail on untested hardware
            text = f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:500]}"
        finally:
            logging.getLogger("parlay").removeHandler(warned)
        said = "".join(f"\n\nWARNED: {line}" for line in warned.lines)
        yield f"\n## {part.title}\n\n{text}{said}\n\n({time.perf_counter() - began:.0f} s)"


class _Warnings(logging.Handler):
    """Collects warnings, which report parts that do not run here as they should."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def machine(device: torch.device) -> str:
    """Return the versions, the commit and the device as JSON."""
    found = provenance("make check-gpu")
    found["triton"] = metadata.version("triton") if find_spec("triton") else None
    found["cuda"] = torch.version.cuda
    if device.type == "cuda":
        own = torch.cuda.get_device_properties(device)
        found["device"] = f"{own.name}, {own.total_memory / 2**30:.0f} GiB, capability {own.major}.{own.minor}"
    return f"```json\n{json.dumps(found, indent=1)}\n```"


def kernels() -> str:
    """Run the tests that compare kernels with torch's operators, and return their last lines."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", "-n0", *TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    lines = done.stdout.strip().splitlines()
    return "\n".join(["```text", *lines[-1 if done.returncode == 0 else -60 :], "```"])


def kit(device: torch.device) -> str:
    """Run the conformance kit on a tiny model in float64, where no token may differ, with and without CUDA graphs."""
    lines = list[str]()
    for graphs in (True, False):
        stage = native_stage(torch.float64, device=device, graphs=graphs)
        for spec in KIT:
            report = check_strategy(spec, effort=KIT_LENGTH, stages=[stage], checks=KIT_CHECKS)
            how = "with graphs" if graphs else "without graphs"
            lines.append(f"- `{report.subject}`, {how}: {'passed' if report.passed else 'FAILED'}")
            lines += [f"- {failure}" for failure in report.failures]
    return "\n".join(lines)


def random_weights(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Return random weights, small enough that nothing overflows."""
    chance = torch.Generator(device).manual_seed(0)
    return {
        name: torch.randn(shape, generator=chance, device=device, dtype=dtype).mul_(shape[-1] ** -0.5)
        for name, shape in weight_shapes(config).items()
    }


def forwards(config: DecoderConfig, device: torch.device, contexts: Sequence[int], rows: Sequence[int]) -> str:
    """Return a table of milliseconds of a forward, by rows and by tokens before them, in each of `WAYS`."""
    weights, found, kernels = random_weights(config, torch.bfloat16, device), [], list[str]()
    for name, (paged, graphs) in WAYS.items():
        recorder = partial(CudaRecorder, device) if graphs and device.type == "cuda" else None
        runner = _runner(config, weights, device, max(contexts) + max(rows) + 64, paged=paged, recorder=recorder)
        found.append(_milliseconds(runner, contexts, rows))
        kernels.append(f"\n{name}: {runner.spec.kernels}")
    lines = [f"| tokens before | rows | {' | '.join(f'{name}, ms' for name in WAYS)} |", "|---|---|---|---|---|"]
    for cell in found[0]:
        lines.append(f"| {cell[0]} | {cell[1]} | {' | '.join(f'{each[cell]:.2f}' for each in found)} |")
    return "\n".join([*lines, *kernels])


def _runner(
    config: DecoderConfig,
    weights: Mapping[str, Tensor],
    device: torch.device,
    room: int,
    *,
    paged: bool,
    recorder: Callable[[], CudaRecorder] | None,
) -> NativeRunner:
    """Make a runner in bfloat16 with room for ``room`` tokens."""

    def make(
        config: DecoderConfig,
        weights: Mapping[str, Operand],
        dtype: torch.dtype,
        device: torch.device,
        *,
        packed: Packed,
        cached: str,
    ) -> tuple[Forward, str]:
        made = EagerForward(config, weights, dtype, device, paged=paged, recorder=recorder)
        return made, made.kernels.reason

    runner = NativeRunner(
        config, weights, dtype=torch.bfloat16, device=device, max_tokens_cached=room, make_forward=make
    )
    runner.open(0, ())
    runner.reserve(0, room)
    return runner


def _milliseconds(runner: NativeRunner, contexts: Sequence[int], rows: Sequence[int]) -> dict[tuple[int, int], float]:
    """Return the median milliseconds of some forwards, by tokens before and rows."""
    found: dict[tuple[int, int], float] = {}
    for context in sorted(contexts):
        while (cached := runner.store.length(0)) < context:
            runner.forward([Segment(0, (7,) * min(512, context - cached), logits_from=min(512, context - cached))])
            runner.keep(0, ())
        for count in rows:
            segment = Segment(0, (7,), trees.chain_tree([8] * (count - 1)))
            found[context, count] = median(_timed(runner, segment) for _ in range(12))
    return found


def _timed(runner: NativeRunner, segment: Segment) -> float:
    """Return the milliseconds until the logits are on the CPU."""
    began = time.perf_counter()
    runner.forward([segment]).logits_RV.amax().item()
    return 1e3 * (time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts to measure: ``prompts`` prompts of each kind. Published kinds come from the folder ``data``."""

    kinds: Sequence[str]
    prompts: int
    max_tokens: int
    data: Path | None = None


def speeds(model: str, device: torch.device, texts: Texts, *, graphs: bool = True) -> str:
    """Measure the default strategy against plain decoding by kind of text, as in the README."""
    plan = BenchPlan(
        model=model,
        strategies=(DEFAULT_STRATEGY,),
        workloads=tuple(workloads.load(texts.kinds, texts.prompts, texts.data)),
        rounds=1,
        max_tokens=texts.max_tokens,
    )
    load = LoadOptions(device=str(device), enforce_eager=not graphs)
    with tempfile.TemporaryDirectory() as folder, LLM(model, load=load, router_memory="off") as llm:
        results = Results(Path(folder) / "gpu.jsonl", provenance("make check-gpu"))
        Bench(llm, plan, results).run()
        kernels = llm.runner.spec.kernels
    cells = table(summarise(results.rows, plan.cells()))
    return f"`{model}`, greedy, {texts.max_tokens} tokens at most; {kernels}\n\n```text\n{cells}\n```"


def parts(model: str, device: torch.device, data: Path | None) -> list[Part]:
    """Return all parts, the quick ones first. With ``data``, a folder of published sets, the texts are the README's."""
    usual = Texts(KINDS, prompts=3, max_tokens=128)
    texts = usual if data is None else Texts(PUBLISHED, prompts=2, max_tokens=128, data=data)
    few = Texts(KINDS[:2], prompts=2, max_tokens=128)
    return [
        Part("Machine", lambda: machine(device)),
        Part("Kernels against torch's operators", kernels),
        Part("Conformance in float64", lambda: kit(device)),
        Part("Forwards of Qwen2.5-1.5B's shape", lambda: forwards(SHAPE, device, (256, 4096), (1, 4, 16, 64))),
        Part("Speeds by kind of text", lambda: speeds(model, device, texts)),
        Part("Speeds without CUDA graphs", lambda: speeds(model, device, few, graphs=False)),
    ]


@one_line_errors("gpu")
def main(arguments: Sequence[str] | None = None) -> int:
    """Print and save the page. Returns 1 if a part failed, and 2 without a GPU."""
    parser = command_parser("gpu", __doc__)
    parser.add_argument("--model", default=MODEL, help=f"the model whose speeds are measured (default: {MODEL})")
    parser.add_argument(
        "--data", type=Path, help="folder of published sets: measure their 16 kinds of question instead of five"
    )
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("error: torch sees no CUDA device here, so there is nothing to check", file=sys.stderr)
        return 2
    lines: list[str] = []
    for text in page(parts(options.model, torch.device("cuda"), options.data)):
        lines.append(text)
        print(text, flush=True)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"\nThis page is in {PAGE.relative_to(ROOT)}: send it with an issue, also if a part failed.")
    return 1 if "FAILED" in "\n".join(lines) else 0


if __name__ == "__main__":
    sys.exit(main())
