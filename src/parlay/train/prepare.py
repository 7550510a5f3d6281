"""From a data directory to a work directory: tokenizer, token streams of every kind, held-out streams, file hashes."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

from tokenizers import Tokenizer

from parlay.train.corpus import Document, read_corpus
from parlay.train.store import Stream, write_stream
from parlay.train.tasks import CHARS, LONG_CHARS, SHORT_CHARS, make_sources, task_documents
from parlay.train.tokenizer import train_tokenizer

# Characters of each kind shown to the tokenizer's trainer.
SAMPLE_CHARS = {
    "prose": 4_000_000,
    "technical": 2_000_000,
    "speech": 600_000,
    "code": 4_000_000,
    "maths": 1_500_000,
    "instructions": 800_000,
    "calls": 1_000_000,
    "translation": 2_500_000,
}
FOLDERS = (
    "books-pd",
    "tech-prose-cc0",
    "us-speeches-pd",
    "gsm8k",
    "p3-puzzles",
    "oasst-commitpackft-sample",
    "self-instruct-human",
    "scitldr",
    "taskmaster4",
    "tatoeba",
    "mbpp",
)
READY = "ready.json"


def prepare(data: Path, work: Path, *, vocab_size: int, tasks: int, seed: int) -> None:
    """Fills ``work`` unless an earlier call with the same arguments has done so."""
    wanted = {"data": str(data), "vocab_size": vocab_size, "tasks": tasks, "seed": seed}
    ready = work / READY
    if ready.exists() and json.loads(ready.read_text())["options"] == wanted:
        return
    work.mkdir(parents=True, exist_ok=True)
    corpus = read_corpus(data)
    tokenizer = train_tokenizer(tokenizer_sample(corpus, seed), vocab_size)
    tokenizer.save(str(work / "tokenizer.json"))
    counts = write_corpus(corpus, work, tokenizer) | write_tasks(corpus, work, tokenizer, tasks, seed)
    ready.write_text(json.dumps({"options": wanted, "tokens": counts, "files": file_hashes(data)}, indent=1))


def tokenizer_sample(corpus: dict[str, list[Document]], seed: int) -> list[str]:
    """Shuffled slices of the training documents, ``SAMPLE_CHARS`` of each kind, special tokens cut out."""
    rng = random.Random(seed)
    sample: list[str] = []
    for kind, room in SAMPLE_CHARS.items():
        documents = [document.text for document in corpus[kind] if not document.heldout]
        rng.shuffle(documents)
        for text in documents:
            if room <= 0:
                break
            piece = text[: min(room, 30_000)]
            room -= len(piece)
            sample.extend(piece.replace("<|", "\n").replace("|>", "\n").split("\n\n"))
    return sample


def write_corpus(corpus: dict[str, list[Document]], work: Path, tokenizer: Tokenizer) -> dict[str, int]:
    """Streams of the read kinds, training and held-out; returns tokens by stream."""
    counts = {}
    for kind, documents in corpus.items():
        for name, heldout in ((kind, False), (f"{kind}.heldout", True)):
            texts = [document.text for document in documents if document.heldout == heldout]
            counts[name] = write_stream(work, name, texts, tokenizer) if texts else 0
    return counts


def write_tasks(
    corpus: dict[str, list[Document]], work: Path, tokenizer: Tokenizer, tasks: int, seed: int
) -> dict[str, int]:
    """Streams of generated tasks: of usual length, short, long, and held-out."""
    sources = make_sources(corpus, heldout=False)
    heldout = make_sources(corpus, heldout=True)
    texts = {
        "tasks": task_documents(sources, tasks, CHARS, seed),
        "short_tasks": task_documents(sources, tasks, SHORT_CHARS, seed + 3),
        "long_tasks": task_documents(sources, max(1, tasks // 6), LONG_CHARS, seed + 1),
        "tasks.heldout": task_documents(heldout, max(1, tasks // 50), CHARS, seed + 2),
    }
    return {name: write_stream(work, name, list(stream), tokenizer) for name, stream in texts.items()}


def file_hashes(data: Path) -> dict[str, str]:
    """SHA-256 of every data file, by its path under ``data``, for the provenance record."""
    files = [path for folder in FOLDERS for path in sorted((data / folder).iterdir()) if path.suffix != ".md"]
    return {str(path.relative_to(data)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def load_streams(work: Path, *, heldout: bool) -> dict[str, Stream]:
    """Streams by kind; held-out ones under the plain name of their kind."""
    names = [path.name.removesuffix(".tokens.npy") for path in sorted(work.glob("*.tokens.npy"))]
    chosen = [name for name in names if name.endswith(".heldout") == heldout]
    return {name.removesuffix(".heldout"): Stream.load(work, name) for name in chosen}
