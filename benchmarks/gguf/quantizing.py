"""Compares `parlay quantize` with llama-quantize and llama-imatrix, on a model with unrounded weights: `parlay-mini`.

    python -m benchmarks.gguf.quantizing --llama DIR

Both programs round the same bfloat16 file. Each result reads a text of this repository; its divergence in nats is from
the probabilities of the unrounded file. A mixture of experts made of the same model is measured, too: its experts are
the model's feed-forwards with some noise. Importance matrices are also compared. Nothing depends on the machine's load.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

import gguf
from benchmarks.commands import RESULTS, one_line_errors
from benchmarks.gguf.families import qwen2_splits
from benchmarks.options import command_parser
from benchmarks.pages import about, table
from parlay import models
from parlay.bench.provenance import ROOT, provenance
from parlay.models.fetch.resolving import resolve
from parlay.models.gguf.importance import CHUNK, MOST_TOKENS, ReadText, importance
from parlay.models.gguf.mixtures import FILE_TYPES
from parlay.models.gguf.quantizing import quantize, source_of
from parlay.models.loading import load_tokenizer, load_weights, read_config
from parlay.options import LoadOptions
from parlay.types import Segment

MODEL, TYPES = "parlay-mini", ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "Q3_K_M")
TOKENS, PIECE = 3000, 500
EXPERTS, CHOSEN, NOISE = 4, 2, 0.1
READ, WEIGHED = "docs/explanation", "docs/how-to"
ABOUT = f"""{TOKENS:,} tokens of {READ}, in pieces of {PIECE}. Importance is that of the first {MOST_TOKENS:,} tokens of
{WEIGHED}. *Ratio*: Parlay's divergence over llama.cpp's; the goal is 1.10. The mixture has {EXPERTS} experts of which a
row chooses {CHOSEN}, each the model's feed-forward with noise of {NOISE:.0%} of its size, and a random router."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """The mean divergences of both programs' files of one type, in nats."""

    model: str
    kind: str
    weighed: bool
    parlay: float
    llama: float


@dataclass(frozen=True, slots=True)
class Weighed:
    """How importance matrices agree: their number, and the least and the median correlation of their logarithms."""

    model: str
    matrices: int
    least: float
    median: float


def with_experts(folder: Path, out: Path) -> None:
    """Write a mixture of experts that is made of a dense Qwen3 model."""
    tensors, draw = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    said = json.loads((folder / "config.json").read_text())
    for name in [name for name in tensors if ".mlp." in name]:
        at, part = name.split(".mlp.")
        numbers = tensors.pop(name)
        for expert in range(EXPERTS):
            noise = torch.randn(numbers.shape, generator=draw) * numbers.float().std() * NOISE
            tensors[f"{at}.mlp.experts.{expert}.{part}"] = (numbers.float() + noise).to(numbers.dtype)
        router = torch.randn(EXPERTS, said["hidden_size"], generator=draw)
        tensors[f"{at}.mlp.gate.weight"] = router.to(numbers.dtype)
    more = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "norm_topk_prob": True, "mlp_only_layers": []}
    more |= {"moe_intermediate_size": said["intermediate_size"], "decoder_sparse_step": 1, "model_type": "qwen3_moe"}
    out.mkdir()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps({**said, **more, "architectures": ["Qwen3MoeForCausalLM"]}))
    for file in folder.glob("tokenizer*"):
        shutil.copy(file, out)


def with_known_tokenizer(folder: Path, out: Path) -> None:
    """Copy a model and give it Qwen2's way of splitting text, because GGUF has no name for its own way.

    The copy puts no token before a text, because llama-imatrix would put it before every chunk.
    """
    shutil.copytree(folder, out)
    path = out / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.pre_tokenizer = qwen2_splits()
    path.write_text(json.dumps({**json.loads(tokenizer.to_str()), "post_processor": None}))


def text_of(folder: str) -> str:
    """Return the text of all pages in a folder of this repository."""
    return "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / folder).glob("*.md")))


def chances(file: Path, ids: Sequence[int]) -> Tensor:
    """Return log-probabilities ``[N, V]`` of the next tokens, computed piece by piece."""
    runner, found = models.load(str(file), LoadOptions(dtype="float32", device="cpu"), cache_tokens=2 * PIECE), []
    for first in range(0, len(ids), PIECE):
        piece = ids[first : first + PIECE]
        runner.open(0, piece, salt=str(first))
        runner.reserve(0, len(piece))
        found.append(runner.forward([Segment(0, tuple(piece))]).logits_RV.log_softmax(-1))
        runner.release(0)
    return torch.cat(found)


class Rounding:
    """Rounds one model with both programs, and compares the results."""

    def __init__(self, name: str, folder: Path, work: Path, programs: Path) -> None:
        self.name, self._programs, self._work = name, programs, work
        self._file = work / f"{name}.gguf"
        quantize(source_of(folder), FILE_TYPES["BF16"], self._file)
        self._source, config, tokenizer = source_of(self._file), read_config(self._file), load_tokenizer(folder)
        self._ids = tokenizer.encode(text_of(READ))[:TOKENS]
        self._exact = chances(self._file, self._ids)
        text, self._matrix = work / "weighed.txt", work / f"{name}.imatrix.gguf"
        text.write_text(text_of(WEIGHED), encoding="utf-8")
        self._known = importance(config, load_weights(self._file, config), ReadText.of(text_of(WEIGHED), tokenizer))
        chunks = ("-c", str(CHUNK), "--chunks", str(MOST_TOKENS // CHUNK), "--no-ppl")
        self._run("llama-imatrix", "-m", self._file, "-f", text, "-o", self._matrix, *chunks)

    def importance(self) -> Weighed:
        """Compare importance matrices."""
        theirs, found = means_of(self._matrix), []
        for name, ours in self._known.items():
            for one, other in zip(ours.view(-1, ours.shape[-1]), theirs[name], strict=True):
                both = torch.stack((one.clamp(min=1e-12).log(), other.clamp(min=1e-12).log()))
                found.append(float(torch.corrcoef(both)[0, 1]))
        return Weighed(self.name, len(found), min(found), sorted(found)[len(found) // 2])

    def rounded(self, kind: str) -> Iterator[Rounded]:
        """Compare files of one type, without importance and with it."""
        ours, theirs = self._work / "ours.gguf", self._work / "theirs.gguf"
        for weighed in (False, True):
            known, more = (self._known, ("--imatrix", self._matrix)) if weighed else (None, ())
            quantize(self._source, FILE_TYPES[kind], ours, importance=known)
            self._run("llama-quantize", *more, self._file, theirs, kind)
            yield Rounded(self.name, kind, weighed, self._divergence(ours), self._divergence(theirs))

    def _divergence(self, file: Path) -> float:
        """Return the mean of KL(exact || file) over the text, in nats."""
        return float((self._exact.exp() * (self._exact - chances(file, self._ids))).sum(-1).mean())

    def _run(self, program: str, *words: object) -> None:
        command = [str(self._programs / program), *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{program} ended with {done.returncode}: {done.stderr[-500:]}")


def means_of(matrix: Path) -> Mapping[str, Tensor]:
    """Read the mean squares ``[E, I]`` of a matrix's inputs from a file of llama-imatrix, by the matrix's name."""
    tensors = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in gguf.GGUFReader(matrix).tensors}
    found = {}
    for name, sums in tensors.items():
        if name.endswith(".in_sum2"):
            counts = tensors[name.replace(".in_sum2", ".counts")].view(-1, 1)
            found[name.removesuffix(".in_sum2")] = sums.view(len(counts), -1) / counts.clamp(min=1)
    return found


def page(rows: Sequence[Rounded], matrices: Sequence[Weighed], title: Sequence[str]) -> str:
    """Write both tables."""
    lines = [
        (
            *(one.model, one.kind, "yes" if one.weighed else "no"),
            *(f"{one.parlay:.5f}", f"{one.llama:.5f}", f"{one.parlay / one.llama:.2f}"),
        )
        for one in rows
    ]
    agree = [(one.model, str(one.matrices), f"{one.least:.4f}", f"{one.median:.5f}") for one in matrices]
    return "\n".join(
        [
            *title,
            *table(("model", "type", "importance", "Parlay", "llama.cpp", "ratio"), lines),
            "Importance matrices of one text: correlations of logarithms of mean squares, over matrices and experts.",
            "",
            *table(("model", "matrices", "least", "median"), agree),
        ]
    )


@one_line_errors("gguf.quantizing")
def main() -> None:
    """Run the command."""
    parser = command_parser("gguf.quantizing", __doc__)
    parser.add_argument("--llama", type=Path, required=True, metavar="DIR", help="has llama-quantize and llama-imatrix")
    parser.add_argument("--types", nargs="+", choices=FILE_TYPES, default=TYPES, metavar="TYPE")
    parser.add_argument("--out", type=Path, default=RESULTS / "quantizing.json", metavar="FILE")
    options = parser.parse_args()
    rows: list[Rounded] = []
    matrices: list[Weighed] = []
    with tempfile.TemporaryDirectory() as place:
        work, mini = Path(place), Path(place) / "dense"
        with_known_tokenizer(resolve(MODEL), mini)
        with_experts(mini, work / "experts")
        for name, folder in ((MODEL, mini), (f"{MODEL} with experts", work / "experts")):
            rounding = Rounding(name, folder, work, options.llama)
            matrices.append(rounding.importance())
            print(matrices[-1], flush=True)
            for kind in options.types:
                for row in rounding.rounded(kind):
                    rows.append(row)
                    print(row, flush=True)
    origin = provenance("python -m benchmarks.gguf.quantizing --llama DIR")
    record = {"origin": origin, "rows": [*map(asdict, rows)], "importance": [*map(asdict, matrices)]}
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    title = [
        "# Files of few bits beside llama.cpp's",
        "",
        f"{about(origin)} Beside it: llama.cpp b11434.",
        "",
        ABOUT,
        "",
    ]
    options.out.with_suffix(".md").write_text(page(rows, matrices, title), encoding="utf-8")


if __name__ == "__main__":
    main()
