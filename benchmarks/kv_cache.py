"""Measures what rounding cached keys and values costs: how next-token probabilities differ by type of cache.

    python -m benchmarks.kv_cache --model FILE

The texts are this repository's documents and sources. Every type reads the same pieces. The last rows of a piece are
compared with those of a float32 cache: the divergence KL(float32 || type) in nats, and how often the likeliest token is
the same. Logits do not depend on the machine's load.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.commands import RESULTS, one_line_errors
from benchmarks.options import command_parser
from benchmarks.pages import about, table
from parlay import models
from parlay.bench.provenance import provenance
from parlay.models.fetch.resolving import resolve
from parlay.models.loading import load_tokenizer
from parlay.options import LoadOptions
from parlay.types import Runner, Segment

REFERENCE, TYPES = "float32", ("bfloat16", "q8_0")
TEXTS = {"documents": ("docs", "*.md"), "sources": ("src", "*.py")}
CHUNK, COMPARED = 512, 256
"""The number of rows per forward, and the number of last rows of a piece that are compared."""

ABOUT = f"""The last {COMPARED} rows of each piece against those of a float32 cache: means over rows of all pieces.
*Nats*: what the type adds to the text's own loss."""


@dataclass(frozen=True, slots=True)
class Drift:
    """One piece of a text, read with one type of cache. The values are means over the compared rows."""

    text: str
    tokens: int
    cache: str
    divergence: float
    same: float
    nats: float


def pieces(text: Sequence[int], tokens: int, most: int) -> list[Sequence[int]]:
    """Cut at most ``most`` evenly spread pieces from a text, each of ``tokens`` tokens and the one that follows."""
    count = min(most, len(text) // (tokens + 1))
    step = len(text) // max(count, 1)
    return [text[first : first + tokens + 1] for first in range(0, count * step, step)]


def last_logits(runner: Runner, piece: Sequence[int]) -> Tensor:
    """Return log-probabilities ``[COMPARED, V]`` of the tokens after the last rows of a piece."""
    rows, last = len(piece) - 1, len(piece) - 1 - COMPARED
    runner.open(0, (), "")
    runner.reserve(0, rows)
    for first in (*range(0, last, CHUNK), last):
        end = rows if first == last else min(first + CHUNK, last)
        tokens = tuple(piece[first:end])
        found = runner.forward([Segment(0, tokens, logits_from=0 if first == last else len(tokens))])
        runner.keep(0, ())
    runner.truncate(0, 0)
    runner.release(0)
    return torch.log_softmax(found.logits_RV.double(), -1)


def drift(text: str, piece: Sequence[int], runners: Mapping[str, Runner]) -> Iterator[Drift]:
    """Compare the types of cache on one piece."""
    expected = last_logits(runners[REFERENCE], piece)
    truth = torch.tensor(list(piece[-COMPARED:]))[:, None]
    for cache in TYPES:
        found = last_logits(runners[cache], piece)
        divergence = (expected.exp() * (expected - found)).sum(-1).mean()
        same = (expected.argmax(-1) == found.argmax(-1)).double().mean()
        nats = (expected.gather(1, truth) - found.gather(1, truth)).mean()
        yield Drift(text, len(piece) - 1, cache, float(divergence), float(same), float(nats))


def by_text(found: Sequence[Drift]) -> Iterator[tuple[str, ...]]:
    """Yield a table row for each text, length and type."""
    groups: dict[tuple[str, int, str], list[Drift]] = defaultdict(list)
    for one in found:
        groups[one.text, one.tokens, one.cache].append(one)
    for (text, tokens, cache), own in groups.items():
        yield (
            *(text, f"{tokens:,}", cache, str(COMPARED * len(own))),
            f"{statistics.mean(one.divergence for one in own):.5f}",
            f"{statistics.mean(one.same for one in own):.2%}",
            f"{statistics.mean(one.nats for one in own):+.4f}",
        )


@one_line_errors("kv_cache")
def main() -> None:
    """Run the command."""
    parser = command_parser("kv_cache", __doc__)
    parser.add_argument("--model", required=True, metavar="FILE")
    parser.add_argument("--tokens", type=int, nargs="+", default=(1024, 4096), metavar="N")
    parser.add_argument(
        "--pieces", type=int, default=4, metavar="N", help="greatest number of pieces of each text and length"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "kv-cache.json", metavar="FILE")
    options = parser.parse_args()
    tokenizer = load_tokenizer(resolve(options.model))
    runners = {
        cache: models.load(options.model, LoadOptions(kv_cache_dtype=cache), cache_tokens=max(options.tokens) + 64)
        for cache in (REFERENCE, *TYPES)
    }
    found: list[Drift] = []
    for name, (folder, pattern) in TEXTS.items():
        files = sorted(Path(folder).rglob(pattern))
        ids = tokenizer.encode("\n".join(file.read_text(encoding="utf-8") for file in files))
        for tokens in options.tokens:
            for piece in pieces(ids, tokens, options.pieces):
                found += drift(name, piece, runners)
                print(found[-1], flush=True)
    what = f"--model {Path(options.model).name} --tokens {' '.join(map(str, options.tokens))} --pieces {options.pieces}"
    record = provenance(f"python -m benchmarks.kv_cache {what}")
    options.out.write_text(json.dumps({"origin": record, "rows": [asdict(one) for one in found]}, indent=1) + "\n")
    head = ("text", "tokens before", "cache", "rows", "KL", "same likeliest token", "nats")
    title = ["# What rounding the cache costs", "", f"{Path(options.model).name}. {about(record)}", "", ABOUT, ""]
    page = "\n".join([*title, *table(head, list(by_text(found)))])
    options.out.with_suffix(".md").write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
