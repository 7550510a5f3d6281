"""N-grams at the input: the longest frequent one that ends at a token of a row's path, in chains, trees and batches."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3ForCausalLM

from parlay import models
from parlay.compiled.library import SWITCH
from parlay.models.families.reading import read_config
from parlay.models.gguf.blocks import rounded
from parlay.models.lookup import TABLE, NgramTable
from parlay.models.lookup_index import frequent_ngrams
from parlay.models.native import NativeRunner
from parlay.models.weights.fused import Operand
from parlay.options import LoadOptions
from parlay.ranks.layout import Layout
from parlay.testing.checkpoints import VOCAB_SIZE, save_random
from parlay.testing.conformance import KitLength, check_runner, run_check, runner_stage, subject_of
from parlay.testing.conformance.stages import recomputed
from parlay.types import Features, ParlayError, Runner, Segment, Tree

FP32 = LoadOptions(dtype="float32", device="cpu")
SOME = 6
"""So few tokens make texts in which many n-grams stand often."""


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(SOME, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def save_scone(folder: Path, seed: int = 0) -> Path:
    """A tiny Qwen3 with random embeddings of the 150 most frequent n-grams of a random text."""
    save_random("qwen3", folder, seed=seed)
    index = frequent_ngrams(np.array(text(600, seed)), VOCAB_SIZE, longest=4, most=150)
    size = json.loads((folder / "config.json").read_text())["hidden_size"]
    NgramTable.write(folder, index, torch.randn(len(index), size, generator=torch.Generator().manual_seed(seed)))
    return folder


@pytest.fixture(scope="module")
def scone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_scone(tmp_path_factory.mktemp("scone"))


def ngrams_of(folder: Path) -> dict[tuple[int, ...], Tensor]:
    """The table as a plain dictionary, by walking from each n-gram to its suffix."""
    tensors = load_file(folder / TABLE)
    grams: list[tuple[int, ...]] = []
    for key in tensors["keys"].tolist():
        node, first = divmod(key, VOCAB_SIZE)
        grams.append((first, *((node,) if node < VOCAB_SIZE else grams[node - VOCAB_SIZE])))
    return dict(zip(grams, tensors["embeddings"].float(), strict=True))


def reference(folder: Path, tokens: Sequence[int]) -> Tensor:
    """Logits ``[N, V]`` of transformers' Qwen3, whose inputs are made row by row."""
    model = Qwen3ForCausalLM(Qwen3ForCausalLM.config_class.from_dict(json.loads((folder / "config.json").read_text())))
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    grams, inputs_NH = ngrams_of(folder), model.model.embed_tokens(torch.tensor(tokens)).detach()
    for row in range(len(tokens)):
        ending = [tuple(tokens[row + 1 - length : row + 1]) for length in (4, 3, 2) if length <= row + 1]
        inputs_NH[row] += next((grams[gram] for gram in ending if gram in grams), torch.zeros(()))
    with torch.no_grad():
        logits: Tensor = model(inputs_embeds=inputs_NH[None]).logits[0]
    return logits


def test_the_most_frequent_ngrams_are_found() -> None:
    """Those that counting by hand finds, and of each place of a text the longest that ends there."""
    tokens = text(400)
    index = frequent_ngrams(np.array(tokens), VOCAB_SIZE, longest=5, most=120)
    rows, lengths = index.tokens()
    found = {tuple(row[:length]) for row, length in zip(rows.tolist(), lengths.tolist(), strict=True)}
    counts = Counter(tuple(tokens[at : at + n]) for n in range(2, 6) for at in range(len(tokens) - n + 1))
    assert len(found) == len(index) == 120
    assert min(counts[gram] for gram in found) >= max(count for gram, count in counts.items() if gram not in found)
    table = NgramTable(index, np.zeros((120, 2), np.uint16))
    last = [tokens[at : at + 5] for at in range(50)] + [[tokens[0], -1, 0, 0, 0]]
    expected = [max((len(gram) for gram in found if gram == tuple(row[: len(gram)][::-1])), default=0) for row in last]
    assert [int(lengths[gram]) if gram >= 0 else 0 for gram in table._found(last)] == expected


def test_a_table_that_is_written_anew_leaves_the_one_that_others_have_mapped(scone: Path, tmp_path: Path) -> None:
    """Who cuts a mapped file short ends the process that reads it."""
    shutil.copytree(scone, tmp_path, dirs_exist_ok=True)
    table, before = NgramTable.open(tmp_path, read_config(tmp_path)), (tmp_path / TABLE).stat().st_ino
    kept = table._embeddings_FH.copy()
    index = frequent_ngrams(np.array(text(600)), VOCAB_SIZE, longest=4, most=len(kept))
    NgramTable.write(tmp_path, index, torch.zeros(kept.shape))
    assert (tmp_path / TABLE).stat().st_ino != before
    assert np.array_equal(table._embeddings_FH, kept)


@pytest.mark.parametrize("compiled", [True, False])
def test_logits_are_those_of_a_slow_reference(scone: Path, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two chunks, so that n-grams reach into the cached text, in C and in torch."""
    if not compiled:
        monkeypatch.setenv(SWITCH, "0")
    runner, tokens = models.load(str(scone), FP32, cache_tokens=256), text(60, seed=3)
    assert ("compiled" in runner.spec.kernels.split(";")[0]) == compiled
    runner.open(0, tokens)
    assert runner.reserve(0, 64)
    first = runner.forward([Segment(0, tuple(tokens[:41]))]).logits_RV
    runner.keep(0, ())
    logits = torch.cat((first, runner.forward([Segment(0, tuple(tokens[41:]))]).logits_RV))
    assert torch.allclose(logits, reference(scone, tokens), atol=1e-4 * float(logits.abs().max()))


def test_a_node_reads_its_path_and_no_sibling(scone: Path) -> None:
    """Nodes of a tree have the very bits that they have as a chain, wherever their siblings stand."""
    runner, tokens = models.load(str(scone), FP32, cache_tokens=512), text(21, seed=5)
    tree = Tree((1, 2, 3, 4, 0, 1), (-1, -1, 0, 1, 2, 3))
    runner.open(0, tokens)
    assert runner.reserve(0, 64)
    rows = runner.forward([Segment(0, tuple(tokens), tree)]).logits_RV[len(tokens) :]
    for number, path in enumerate(([0, 2, 4], [1, 3, 5]), start=1):
        chain = [*tokens, *(tree.tokens[node] for node in path)]
        runner.open(number, chain, salt="alone")
        assert runner.reserve(number, 64)
        assert runner.forward([Segment(number, tuple(chain))]).logits_RV[-3:].equal(rows[path])


def test_features_are_added_to_the_same_inputs(scone: Path) -> None:
    """Rows with features that add nothing have the very bits of rows without: both ways look up alike."""
    runner, tokens = models.load(str(scone), FP32, cache_tokens=256), tuple(text(30, seed=7))
    runner.open(0, tokens)
    assert runner.reserve(0, 32)
    plain = runner.forward([Segment(0, tokens)]).logits_RV
    nothing = Features(torch.zeros(len(tokens), runner.spec.hidden_size), added=True)
    assert runner.forward([Segment(0, tokens, features=nothing)]).logits_RV.equal(plain)


@pytest.mark.parametrize("compiled", [True, False])
def test_rounded_weights_read_the_same_table(scone: Path, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of fewer bits would be worse without, and nobody would see why."""
    if not compiled:
        monkeypatch.setenv(SWITCH, "0")
    config = models.loading.read_config(scone)
    own, table, tokens = models.loading.load_weights(scone, config), NgramTable.open(scone, config), tuple(text(40))

    def runner_of(weights: Mapping[str, Operand]) -> NativeRunner:
        cpu = torch.device("cpu")
        made = NativeRunner(config, weights, dtype=torch.float32, device=cpu, max_tokens_cached=256, ngrams=table)
        made.open(0, ())
        assert made.reserve(0, 60)
        return made

    runner = runner_of(own)
    runner.round_weights(4, own)
    drafted = runner.forward([Segment(0, tokens, bits=4)]).logits_RV
    assert drafted.equal(runner_of(rounded(own, 4)).forward([Segment(0, tokens)]).logits_RV)
    assert not drafted.equal(runner.forward([Segment(0, tokens)]).logits_RV)


def test_rows_that_run_again_look_up_what_stands_before_them(scone: Path) -> None:
    """Their n-grams reach into text that does not run; beside another sequence, and with a tree behind them."""
    runner, tokens = models.load(str(scone), FP32, cache_tokens=512), tuple(text(30, seed=9))
    for name, part in enumerate((tokens[:20], tokens[5:30])):
        runner.open(name, (), salt=str(name))
        assert runner.reserve(name, 60)
        runner.forward([Segment(name, part, logits_from=len(part))])
        runner.keep(name, ())
    tree = Tree((1, 2, 3), (-1, -1, 0))
    again = Segment(0, tokens[20:24], tree, base=-6, logits_from=-6)
    out = runner.forward([Segment(1, (2, 4)), again])
    runner.open(2, (), salt="alone")
    assert runner.reserve(2, 60)
    alone = runner.forward([Segment(2, tokens[:24], tree)]).logits_RV
    assert out.logits_RV[2:].equal(alone[14:])


def check_with_drafts(
    open_runner: Callable[[int], Runner], open_draft: Callable[[], Runner], strategies: Sequence[str], *, steps: int
) -> None:
    """Walk a runner, of so many cached tokens, at random; then decode a mixed batch under each strategy."""
    report = check_runner(open_runner, recomputed(open_runner(1024)), steps=steps)
    assert report.passed, str(report)
    stage = runner_stage("lookups", open_runner, open_draft)
    for strategy in strategies:
        found = run_check("mixed", subject_of(strategy), stage, KitLength(tokens=24, draws=0))
        assert found.passed, str(found)


@pytest.mark.parametrize("compiled", [True, False])
def test_the_kit_passes_with_drafts(
    scone: Path, tmp_path: Path, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row has the bits of a fresh prefill on random walks, and drafted text is plain text."""
    if not compiled:
        monkeypatch.setenv(SWITCH, "0")
    draft = save_scone(tmp_path, seed=1)

    def open_runner(capacity: int, model: Path = scone) -> NativeRunner:
        runner = models.load(str(model), FP32, cache_tokens=capacity)
        assert isinstance(runner, NativeRunner)
        return runner

    strategies = ("draft-model", "prompt-lookup") if compiled else ("prompt-lookup",)
    check_with_drafts(open_runner, lambda: open_runner(8192, draft), strategies, steps=12 if compiled else 4)


def damaged(folder: Path, how: str) -> None:
    """A table, or what config.json says of it, that is not the model's."""
    table, config = folder / TABLE, json.loads((folder / "config.json").read_text())
    if how == "missing":
        table.unlink()
    elif how == "pipe":
        table.unlink()
        os.mkfifo(table)
    elif how == "cut":
        table.write_bytes(table.read_bytes()[:-5])
    elif how == "other":
        config["ngrams"]["fingerprint"] = "0" * 16
    elif how == "vocabulary":
        config["vocab_size"] = 7
    elif how in ("longest 0", "longest 9"):
        config["ngrams"]["longest"] = int(how[-1])
    elif how == "count":
        config["ngrams"]["count"] += 1
    elif how == "places":
        tensors = table.read_bytes()
        size = int.from_bytes(tensors[:8], "little") + 4
        table.write_bytes(size.to_bytes(8, "little") + tensors[8 : 4 + size] + b"    " + tensors[4 + size :])
    elif how == "header":
        table.write_bytes(b"\xff" * 64)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "is not there"),
        ("pipe", "is not a file"),
        ("cut", "cut short"),
        ("other", "another model"),
        ("longest 0", "of up to 0 tokens: 1 or more, of 2 to 8"),
        ("longest 9", "of up to 9 tokens"),
        ("count", "config.json asks for"),
        ("header", "damaged or cut short"),
        ("places", "keys at a place that is not a multiple of 8: the table is damaged"),
    ],
)
def test_a_table_that_is_not_the_models_is_one_line(tmp_path: Path, how: str, message: str) -> None:
    damaged(save_scone(tmp_path), how)
    with pytest.raises(ParlayError, match=message) as error:
        models.load(str(tmp_path), FP32)
    assert "\n" not in str(error.value)


def test_a_table_of_another_vocabulary_is_one_line(tmp_path: Path) -> None:
    config = models.loading.read_config(save_scone(tmp_path))
    with pytest.raises(ParlayError, match="keys of no vocabulary of 7 tokens"):
        NgramTable.open(tmp_path, models.opening.replace(config, vocab_size=7))


def test_several_ranks_are_refused(scone: Path) -> None:
    with pytest.raises(ParlayError, match="runs in one process"):
        Layout(2, 1, 1, 64).check("scone", models.loading.read_config(scone))


def test_a_table_larger_than_memory_is_mapped(tmp_path: Path) -> None:
    """A file of a terabyte, most of it a hole: it opens at once, and a row is read."""
    hidden, count = 1 << 30, 512
    header = json.dumps(
        {
            "__metadata__": {"fingerprint": "x"},
            "keys": {"dtype": "I64", "shape": [count], "data_offsets": [0, 8 * count]},
            "embeddings": {
                "dtype": "BF16",
                "shape": [count, hidden],
                "data_offsets": [8 * count, (8 + 2 * hidden) * count],
            },
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    with (tmp_path / TABLE).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header + np.arange(count).tobytes())
        file.truncate(8 + len(header) + (8 + 2 * hidden) * count)
    config = models.loading.read_config(save_scone(tmp_path / "model"))
    form = models.opening.replace(config.ngrams, count=count, fingerprint="x")
    table = NgramTable.open(tmp_path, models.opening.replace(config, hidden_size=hidden, ngrams=form))
    assert table._embeddings_FH[count - 1, -8:].tolist() == [0] * 8
