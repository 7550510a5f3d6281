"""Fills a work directory from text files: tokenizer, token streams for training and checks, hashes of the files."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from parlay.text import corpus
from parlay.train.store import TokenStream, write_stream
from parlay.train.tokenizer import END_OF_TEXT, train_tokenizer

HELDOUT_ONE_IN = 20
SAMPLE_CHARS = 16_000_000
"""Characters shown to the tokenizer's trainer."""
PIECE_CHARS = 30_000
"""Longer documents are split, and so are shorter ones of a small corpus: even a single book gets a held-out part."""
TRAINING, HELDOUT = "training", "heldout"
READY = "ready.json"


def prepare(data: Path, work: Path, *, vocab_size: int) -> None:
    """Fills ``work`` unless an earlier call with the same arguments has done so.

    Raises ValueError where ``data`` is not there, or holds no text.
    """
    wanted = {"data": str(data), "vocab_size": vocab_size}
    ready = work / READY
    if ready.exists() and json.loads(ready.read_text())["options"] == wanted:
        return
    sources = corpus.sources([str(data)])
    texts = _pieces([text for source in sources for text, _ in corpus.documents(source) or ()])
    if len(texts) <= 1:
        raise ValueError(f"no text in {data}: name a folder of text files or .jsonl files")
    heldout, training = texts[::HELDOUT_ONE_IN], [text for at, text in enumerate(texts) if at % HELDOUT_ONE_IN]
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(_sample(training), vocab_size)
    tokenizer.save(str(work / "tokenizer.json"))
    parts = {TRAINING: training, HELDOUT: heldout}
    counts = {name: write_stream(work, name, part, tokenizer) for name, part in parts.items()}
    hashes = {os.path.relpath(each.path, data): hashlib.sha256(each.path.read_bytes()).hexdigest() for each in sources}
    ready.write_text(json.dumps({"options": wanted, "tokens": counts, "files": hashes}, indent=1))


def load_stream(work: Path, name: str, longest: int) -> TokenStream:
    """A stream that `prepare` wrote. Raises ValueError where it has too few tokens for rows of ``longest``."""
    stream = TokenStream.load(work, name)
    if len(stream.tokens) <= longest:
        raise ValueError(f"only {len(stream.tokens)} tokens of {name} text: more text, or a shorter context, is needed")
    return stream


def _pieces(documents: list[str]) -> list[str]:
    size = min(PIECE_CHARS, max(1, sum(map(len, documents)) // HELDOUT_ONE_IN))
    starts = [(text, at) for text in documents for at in range(0, len(text), size)]
    return [text[at : at + size].replace(END_OF_TEXT, "\n") for text, at in starts]


def _sample(texts: list[str]) -> list[str]:
    """Paragraphs of texts evenly spaced over the corpus, ``SAMPLE_CHARS`` at most."""
    every = -(-sum(map(len, texts)) // SAMPLE_CHARS) or 1
    return [paragraph for text in texts[::every] for paragraph in text.split("\n\n")]
