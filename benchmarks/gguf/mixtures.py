"""Compares forwards of a mixture of experts with those of a dense model, and matrices of AWQ files with those of
Q4_K_M.

    python -m benchmarks.gguf.mixtures

Weights are random, and one thread runs. A time is the least CPU time of many forwards with different tokens, so other
processes matter little. The dense model has as many weights as one row of the mixture reads; the time to read as many
bytes is measured, too. The second part compares the blocks of AWQ and GPTQ files with those of a Q4_K_M file, once with
the same LM head and once with their usual one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.commands import RESULTS, one_line_errors
from benchmarks.options import command_parser
from benchmarks.pages import about, table
from parlay.bench.provenance import provenance
from parlay.models.config import DecoderConfig, Experts, LayerForm
from parlay.models.families.qwen import QWEN2
from parlay.models.gguf.blocks import encoded
from parlay.models.gguf.mixtures import FILE_TYPES, Mixed
from parlay.models.gguf.weights import gguf_name
from parlay.models.native import NativeRunner
from parlay.models.quantized.affine import Affine
from parlay.models.weights.formats import Format
from parlay.models.weights.shapes import Weight, weight_shapes
from parlay.models.weights.stored import StoredTensor
from parlay.system import threads
from parlay.types import Segment

ROWS, FEW = (1, 2, 4, 8, 16, 32), (1, 16)
BEHIND, TIMES = 64, 15
EXPERTS, CHOSEN = 32, 4
SPARSE = DecoderConfig(
    architecture="Qwen2ForCausalLM",
    vocab_size=4096,
    hidden_size=1024,
    intermediate_size=512,
    num_layers=12,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    rms_norm_eps=1e-6,
    max_context=4096,
    layers=(LayerForm(experts=Experts(count=EXPERTS, chosen=CHOSEN, size=512)),) * 12,
)
DENSE = replace(SPARSE, layers=(), intermediate_size=CHOSEN * 512)
WIDE = replace(SPARSE, layers=(), hidden_size=1536, intermediate_size=8960, num_layers=6, num_heads=12, num_kv_heads=2)
WIDE = replace(WIDE, head_dim=128, vocab_size=32_768)
Make = Callable[[str, tuple[int, ...]], Weight]
ABOUT = f"""The mixture has {EXPERTS} experts, of which each row chooses {CHOSEN}, in 12 layers of width 1,024; all
are in Q4_0. The feed-forwards of the dense model have as many weights as {CHOSEN} experts. The time of reading is
that of as many bytes as one row's weights have. The second table is of six layers with the sizes of a 1.5B model, and
an LM head of 32,768 tokens."""


def in_q4_0(name: str, shape: tuple[int, ...]) -> Weight:
    """Make a random tensor: matrices are in Q4_0, except embeddings and routers."""
    numbers = torch.randn(shape) * shape[-1] ** -0.5 if len(shape) > 1 else torch.ones(shape)
    if len(shape) == 1 or name.endswith(("embed_tokens.weight", "mlp.gate.weight")):
        return numbers
    return StoredTensor(Format.Q4_0, shape, encoded(Format.Q4_0, numbers))


def as_awq(head: Format) -> Make:
    """Return a function that makes random matrices like those of AWQ and GPTQ files, with groups of 128 inputs.

    ``head`` is the format of the LM head.
    """

    def make(name: str, shape: tuple[int, ...]) -> Weight:
        if len(shape) == 1 or name.endswith("embed_tokens.weight"):
            return torch.ones(shape)
        if name.startswith("lm_head"):
            numbers = torch.randn(shape) * shape[-1] ** -0.5
            return numbers.bfloat16() if head is Format.BF16 else StoredTensor(head, shape, encoded(head, numbers))
        return Affine(
            codes_OI=torch.randint(0, 16, shape).to(torch.uint8),
            scales_OG=(torch.rand(shape[0], shape[1] // 128) * 0.01 + 0.001).half(),
            zeros_OG=torch.randint(6, 10, (shape[0], shape[1] // 128)),
        ).in_blocks()

    return make


def as_q4_k_m(name: str, shape: tuple[int, ...]) -> Weight:
    """Make a random tensor in the format that llama.cpp chooses for it in a Q4_K_M file."""
    assert QWEN2.gguf is not None, "files have it"
    mixed = Mixed(FILE_TYPES["Q4_K_M"], WIDE.num_layers, WIDE.num_heads // WIDE.num_kv_heads, False, False)
    numbers = torch.randn(shape) * shape[-1] ** -0.5 if len(shape) > 1 else torch.ones(shape)
    format = mixed.format_of(gguf_name(name, QWEN2.gguf), shape)
    return numbers if format is Format.F32 else StoredTensor(format, shape, encoded(format, numbers))


def runner_of(config: DecoderConfig, make: Make) -> tuple[NativeRunner, Mapping[str, Weight]]:
    """Make a decoder in bfloat16 with random weights, and return both."""
    torch.manual_seed(0)
    weights = {name: make(name, shape) for name, shape in weight_shapes(config).items()}
    runner = NativeRunner(
        config, weights, dtype=torch.bfloat16, device=torch.device("cpu"), max_tokens_cached=2048, name="random"
    )
    return runner, weights


def forward(runner: NativeRunner, rows: int, *, logits: bool = True) -> float:
    """Return the least milliseconds of CPU time of a forward of ``rows`` rows after a text."""
    draw, found = torch.Generator().manual_seed(rows), []
    ids = torch.randint(runner.spec.vocab_size, (TIMES, BEHIND + rows), generator=draw).tolist()
    for turn, text in enumerate(ids):
        runner.open(0, text, salt=str(turn))
        runner.reserve(0, len(text))
        runner.forward([Segment(0, tuple(text[:BEHIND]), logits_from=BEHIND)])
        runner.keep(0, ())
        began = time.process_time()
        runner.forward([Segment(0, tuple(text[BEHIND:]), logits_from=0 if logits else rows - 1)])
        found.append(time.process_time() - began)
        runner.release(0)
    return 1e3 * min(found)


def reading(size: int) -> float:
    """Return the least milliseconds of CPU time of reading ``size`` bytes, other bytes at each try."""
    memory, found = torch.zeros(1 << 27), []
    for turn in range(TIMES):
        part = memory[(turn * size // 4) % (len(memory) - size // 4) :][: size // 4]
        began = time.process_time()
        part.sum().item()
        found.append(time.process_time() - began)
    return 1e3 * min(found)


def active_bytes(weights: Mapping[str, Weight]) -> int:
    """Return how many bytes one row of the mixture reads: all other weights, and the experts that it chooses."""
    total = 0.0
    for name, weight in weights.items():
        if not name.endswith("embed_tokens.weight"):
            size = weight.data.numel() if isinstance(weight, StoredTensor) else weight.numel() * 2
            total += size * CHOSEN / EXPERTS if ".experts." in name else size
    return int(total)


@one_line_errors("gguf.mixtures")
def main() -> None:
    """Run the command."""
    parser = command_parser("gguf.mixtures", __doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "mixtures.json", metavar="FILE")
    options = parser.parse_args()
    threads.use(1)
    torch.set_num_threads(1)
    mixture, weights = runner_of(SPARSE, in_q4_0)
    dense, _ = runner_of(DENSE, in_q4_0)
    both = {"mixture": mixture, "dense": dense}
    times = {name: {rows: forward(runner, rows) for rows in ROWS} for name, runner in both.items()}
    read = reading(active_bytes(weights))
    del mixture, dense, weights, both
    files = {
        "Q4_K_M": as_q4_k_m,
        "AWQ or GPTQ, LM head in Q6_K": as_awq(Format.Q6_K),
        "AWQ or GPTQ, LM head in bfloat16": as_awq(Format.BF16),
    }
    formats = {name: {rows: forward(runner_of(WIDE, make)[0], rows) for rows in FEW} for name, make in files.items()}
    origin = provenance("python -m benchmarks.gguf.mixtures")
    record = {"origin": origin, "milliseconds": times, "reading": read, "formats": formats}
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    lines = [
        (name, *(f"{own[rows]:.2f}" for rows in ROWS), f"{own[1] / read:.2f}", f"{own[8] / own[1]:.2f}")
        for name, own in times.items()
    ]
    head = ("ms of a forward", *(f"{rows} rows" for rows in ROWS), "1 row over reading", "8 rows over 1")
    usual = formats["Q4_K_M"]
    beside = [
        (name, *(f"{own[rows]:.2f}" for rows in FEW), *(f"{own[rows] / usual[rows]:.2f}" for rows in FEW))
        for name, own in formats.items()
    ]
    columns = ("ms of a forward", *(f"{rows} rows" for rows in FEW), *(f"over Q4_K_M, {rows} rows" for rows in FEW))
    title = ["# Mixtures of experts, and blocks of AWQ and GPTQ", "", about(origin), "", ABOUT, ""]
    text = "\n".join(
        [*title, f"Reading one row's weights takes {read:.2f} ms.", "", *table(head, lines), *table(columns, beside)]
    )
    options.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
