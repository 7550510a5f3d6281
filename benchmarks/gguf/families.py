"""Compares every family with llama.cpp: the probabilities of tiny random checkpoints.

    python -m benchmarks.gguf.families --sources LLAMA_CPP --server LLAMA_SERVER

transformers computes each checkpoint in float32. Parlay and llama.cpp read the file that llama.cpp's converter makes of
it, and llama.cpp also reads the file that `parlay quantize --to F16` writes. Divergences are in nats and do not depend
on the machine's load.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as kinds
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from benchmarks.commands import RESULTS, one_line_errors
from benchmarks.options import command_parser
from benchmarks.pages import about, table
from benchmarks.serving.beside_llama import llama_served
from parlay import models
from parlay.bench.provenance import ROOT, provenance
from parlay.models.gguf.mixtures import FILE_TYPES
from parlay.models.gguf.quantizing import quantize, source_of
from parlay.options import LoadOptions
from parlay.testing.checkpoints import FAMILIES, NATIVE, VOCAB_SIZE, save_random
from parlay.types import ParlayError, Segment

LENGTH = 40
"""The number of tokens of the text."""
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen2's pattern for splitting text, which llama.cpp knows by name."""
ABOUT = f"""Each cell is a mean divergence in nats, on a text of {LENGTH} tokens, which is longer than the models'
attention windows. *transformers to llama.cpp* and *to Parlay* compare each program, on the converter's file, with
transformers in float32. *Parlay to llama.cpp* compares the two programs on that file; *same* is how often they agree on
the likeliest token. *Parlay's file* compares llama.cpp, on the file that `parlay quantize --to F16` writes, with
transformers. *Uniform* is the divergence of equal probabilities, for scale. Goal: 0.005. The converter leaves out the
windows of Mistral and Qwen2 and unusual window patterns of Gemma 3, so both programs compute without them. llama.cpp
computes Phi-3 without its windows."""


@dataclass(frozen=True, slots=True)
class Found:
    """Mean divergences of one checkpoint in nats. If something could not be compared, ``reason`` says why."""

    family: str
    architecture: str
    llama: float | None = None
    parlay: float | None = None
    between: float | None = None
    same: float | None = None
    ours: float | None = None
    uniform: float | None = None
    reason: str = ""


def qwen2_splits() -> pre_tokenizers.PreTokenizer:
    """Return a pre-tokenizer that splits text as Qwen2's does, into bytes."""
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(use_regex=False, add_prefix_space=False)])


def save_tokenizer(folder: Path, spare: int) -> None:
    """Write a tokenizer of single letters, with ``spare`` tokens fewer than the checkpoint has."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB_SIZE - 2 - spare]
    vocabulary = {token: place for place, token in enumerate([*letters, letters[0] + letters[1], "<|end|>"])}
    made = Tokenizer(kinds.BPE(vocabulary, [(letters[0], letters[1])]))
    made.pre_tokenizer = qwen2_splits()
    made.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>").save_pretrained(folder)


def convert(sources: Path, folder: Path, out: Path) -> None:
    """Convert a checkpoint to a float32 GGUF file with llama.cpp's converter.

    Raises ParlayError with the last line of its errors.
    """
    words = [sys.executable, "-m", "benchmarks.gguf.converter", sources, folder, "--outfile", out, "--outtype", "f32"]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise ParlayError(f"llama.cpp's converter: {done.stderr.strip().splitlines()[-1]:.160}")


def by_llama(server: Path, file: Path, ids: Sequence[int]) -> Tensor:
    """Return log-probabilities ``[N, V]`` after each token, computed by llama-server."""
    found = torch.full((len(ids), VOCAB_SIZE), -torch.inf)
    with llama_served(server, file, 1, ("-c", "256", "-ctk", "f32", "-ctv", "f32", "-fa", "off")) as address:
        for row in range(len(ids)):
            asked = {"prompt": list(ids[: row + 1]), "n_predict": 1, "n_probs": VOCAB_SIZE, "cache_prompt": False}
            request = urllib.request.Request(f"http://{address}/completion", json.dumps(asked).encode())
            with urllib.request.urlopen(request, timeout=60) as reply:
                (token,) = json.load(reply)["completion_probabilities"]
            for each in token["top_logprobs"]:
                found[row, each["id"]] = each["logprob"]
    return found.double()


def by_parlay(file: Path, ids: Sequence[int]) -> Tensor:
    """Return log-probabilities ``[N, V]`` after each token, computed by Parlay."""
    runner = models.load(str(file), LoadOptions(dtype="float32", device="cpu"), cache_tokens=2 * LENGTH)
    runner.open(0, ids)
    runner.reserve(0, len(ids))
    return runner.forward([Segment(0, tuple(ids))]).logits_RV.double().log_softmax(-1)


def divergence(one: Tensor, other: Tensor) -> float:
    """Return the mean over rows of KL(one || other), in nats."""
    return float((one.exp() * (one - other)).sum(-1).mean())


def compare(name: str, options: argparse.Namespace, folder: Path) -> Found:
    """Measure one checkpoint."""
    model = save_random(name, folder)
    save_tokenizer(
        folder, 6 if name.startswith("qwen2") else 0
    )  # leaves ids for the tokens that Qwen2's tokenizer adds
    ids = torch.randint(VOCAB_SIZE - 8, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    theirs, ours = folder / "theirs.gguf", folder / "ours.gguf"
    found = Found(name, type(model).__name__, uniform=divergence(expected, torch.zeros_like(expected).log_softmax(-1)))
    try:
        convert(options.sources, folder, theirs)
        parlay, llama = by_parlay(theirs, ids), by_llama(options.server, theirs, ids)
        found = replace(
            found,
            llama=divergence(expected, llama),
            parlay=divergence(expected, parlay),
            between=divergence(parlay, llama),
            same=float((parlay.argmax(-1) == llama.argmax(-1)).double().mean()),
        )
        quantize(source_of(folder), FILE_TYPES["F16"], ours)
        return replace(found, ours=divergence(expected, by_llama(options.server, ours, ids)))
    except (ParlayError, ValueError, urllib.error.URLError) as error:
        return replace(found, reason=str(error).replace(str(folder), "FOLDER"))


def page(found: Sequence[Found], title: Sequence[str]) -> str:
    """Write a table of the divergences, and a table of checkpoints that could not be compared."""

    def nats(value: float | None) -> str:
        return "-" if value is None else f"{value:.1e}" if value > 1e-7 else "below 1e-7"

    measured = [
        (
            one.family,
            nats(one.llama),
            nats(one.parlay),
            nats(one.between),
            f"{one.same:.0%}",
            nats(one.ours),
            f"{one.uniform or 0:.2f}",
        )
        for one in found
        if one.same is not None
    ]
    head = (
        "checkpoint",
        "transformers to llama.cpp",
        "to Parlay",
        "Parlay to llama.cpp",
        "same",
        "Parlay's file",
        "uniform",
    )
    lines = [*title, *table(head, measured)]
    left = [(one.family, one.reason) for one in found if one.reason]
    return "\n".join(
        [*lines, *(["Not compared, or not written:", "", *table(("checkpoint", "why"), left)] if left else [])]
    )


@one_line_errors("gguf.families")
def main() -> None:
    """Run the command."""
    parser = command_parser("gguf.families", __doc__)
    parser.add_argument(
        "--sources", type=Path, required=True, metavar="DIR", help="llama.cpp's sources, with its converter"
    )
    parser.add_argument("--server", type=Path, required=True, metavar="FILE", help="llama.cpp's llama-server")
    parser.add_argument("--families", nargs="+", default=(*NATIVE, *FAMILIES), metavar="NAME")
    parser.add_argument("--out", type=Path, default=RESULTS / "families.json", metavar="FILE")
    options = parser.parse_args()
    options.sources = options.sources.resolve()
    found: list[Found] = []
    for name in options.families:
        with tempfile.TemporaryDirectory() as folder:
            found.append(compare(name, options, Path(folder)))
        print(found[-1], flush=True)
    origin = provenance("python -m benchmarks.gguf.families --sources LLAMA_CPP --server LLAMA_SERVER")
    options.out.write_text(json.dumps({"origin": origin, "rows": [asdict(one) for one in found]}, indent=1) + "\n")
    text = page(
        found, ["# Families beside llama.cpp", "", f"{about(origin)} Beside it: llama.cpp b11434.", "", ABOUT, ""]
    )
    options.out.with_suffix(".md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
