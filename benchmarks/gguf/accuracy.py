"""Compares Parlay's logits with llama.cpp's on the same file, and both with a float32 forward of the same weights.

The texts are teacher-forced. Both engines round the inputs of a product to eight bits in blocks of 32, so both differ
from the float32 forward. llama.cpp also differs from itself when a call has another number of rows; no other engine can
be expected to be closer to llama.cpp than that.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.gguf.llama import LlamaCpp
from parlay import models
from parlay.bench.records import Cell, Row
from parlay.bench.workloads.files import records
from parlay.compiled.library import SWITCH
from parlay.llm import LLM
from parlay.options import LoadOptions
from parlay.types import SamplingParams, Segment

PART = "accuracy"
TOKENS = 256
"""The number of tokens of each text."""
BOOKS, ANSWERS = 4, 4
F32_CACHE = 0
DENSE, LLAMA, LLAMA_ONE, LLAMA_F32 = "float32", "llama.cpp", "llama.cpp, row by row", "llama.cpp, cache float32"
PARLAY, PARLAY_F32 = "Parlay", "Parlay, cache float32"
PAIRS = (
    (DENSE, LLAMA),
    (DENSE, LLAMA_ONE),
    (DENSE, LLAMA_F32),
    (DENSE, PARLAY),
    (DENSE, PARLAY_F32),
    (LLAMA, LLAMA_ONE),
    (LLAMA, PARLAY),
    (LLAMA, PARLAY_F32),
)
"""The pairs to compare: the second of a pair is measured against the first."""

Logits = npt.NDArray[np.float32]
"""Logits ``[T, N, V]`` of T texts of N tokens."""


def texts(llm: LLM, data: Path, questions: list[str]) -> npt.NDArray[np.int64]:
    """Return token ids ``[T, N]``: the middles of public-domain books that were left out of all training, and the
    model's answers."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    found: list[list[int]] = []
    for _, record in list(records(data / "books-pd" / "heldout.jsonl.zst"))[:BOOKS]:
        text = record["text"]
        found.append(tokenizer.encode(text[len(text) // 2 :][: 20 * TOKENS])[:TOKENS])
    params = SamplingParams(temperature=0.8, seed=0, max_tokens=TOKENS, ignore_eos=True)
    for output in llm.chat([[{"role": "user", "content": question}] for question in questions[:ANSWERS]], params):
        found.append([*output.prompt_token_ids, *output.outputs[0].token_ids][:TOKENS])
    return np.array(found)


def measure(path: Path, ids_TN: npt.NDArray[np.int64], llama: LlamaCpp) -> Iterator[Row]:
    """Return a row for each of `PAIRS`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "logits.npy"
        with _without_core():
            logits = {DENSE: _ours(path, ids_TN, "float32")}
        logits |= {PARLAY: _ours(path, ids_TN, "bfloat16"), PARLAY_F32: _ours(path, ids_TN, "float32")}
        llama.open(path, 2)
        logits |= {LLAMA: llama.logits(ids_TN, TOKENS, out), LLAMA_ONE: llama.logits(ids_TN, 1, out)}
        llama.open(path, 2, cache=F32_CACHE)
        logits[LLAMA_F32] = llama.logits(ids_TN, TOKENS, out)
    for one, other in PAIRS:
        cell = Cell(part=PART, engine=one, model=path.stem, strategy=other, workload="books and answers")
        values = distance(logits[one], logits[other], ids_TN)
        yield Row(cell=cell, requests=len(ids_TN), tokens=ids_TN.size, values=values)


@contextmanager
def _without_core() -> Iterator[None]:
    """Load models without the C library: torch's operators run them, with weights in float32."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "0"
    try:
        yield
    finally:
        del os.environ[SWITCH]
        if before is not None:
            os.environ[SWITCH] = before


def _ours(path: Path, ids_TN: npt.NDArray[np.int64], dtype: str) -> Logits:
    runner = models.load(str(path), LoadOptions(dtype=dtype), cache_tokens=4 * TOKENS)
    found: list[Logits] = []
    for number, text in enumerate(ids_TN.tolist()):
        runner.open(number, (text[0],))
        runner.reserve(number, len(text))
        found.append(runner.forward([Segment(number, tuple(text), logits_from=0)]).logits_RV.float().numpy().copy())
        runner.release(number)
    return np.stack(found)


def distance(one: Logits, other: Logits, ids_TN: npt.NDArray[np.int64]) -> Mapping[str, float]:
    """Compare two predictions after each token.

    The values are the mean Kullback-Leibler divergence in nats, the share of positions with the same likeliest token,
    and how much larger the other's perplexity is, as a fraction.
    """
    divergence, same, losses = 0.0, 0.0, torch.zeros(2)
    for a_NV, b_NV, ids_N in zip(one, other, torch.from_numpy(ids_TN), strict=True):
        p_NV, q_NV = (torch.log_softmax(torch.from_numpy(each[:-1]), -1) for each in (a_NV, b_NV))
        divergence += float((p_NV.exp() * (p_NV - q_NV)).sum(-1).mean())
        same += float((p_NV.argmax(-1) == q_NV.argmax(-1)).float().mean())
        losses -= torch.stack([_mean_of(each, ids_N) for each in (p_NV, q_NV)])
    texts = len(one)
    ratio = float(((losses[1] - losses[0]) / texts).exp())
    return {"divergence": divergence / texts, "same": same / texts, "perplexity": ratio - 1}


def _mean_of(logprobs_NV: Tensor, ids_N: Tensor) -> Tensor:
    return logprobs_NV.gather(-1, ids_N[1:, None]).mean()
