"""First layers that are looked up: the same numbers in chains, trees and batches, kept, computed or mapped."""

from __future__ import annotations

import json
import random
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3ForCausalLM

from parlay import models
from parlay.compiled.library import SWITCH
from parlay.models.layer_lookup import RecentStates
from parlay.models.loading import load_weights, read_config
from parlay.models.lookup_index import frequent_windows
from parlay.models.native import NativeRunner
from parlay.models.state_table import STATES, StateTable
from parlay.options import LoadOptions, UsageError
from parlay.ranks.layout import Layout
from parlay.testing.checkpoints import VOCAB_SIZE, save_random
from parlay.train.ngram_layers import mark
from parlay.types import ParlayError, Segment, Tree
from tests.models.test_lookup import check_with_drafts

FP32 = LoadOptions(dtype="float32", device="cpu")
SOME = 6
"""So few tokens make texts in which n-grams come again."""
SEEN = 5
"""Tokens that two layers see which see three each."""


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(SOME, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def save_looked_up(folder: Path, seed: int = 0, window: int = 3) -> Path:
    """A tiny Qwen3 with random weights, whose first two of three layers are looked up."""
    save_random("qwen3", folder, seed=seed)
    config = json.loads((folder / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": window}
    config["layer_types"] = ["sliding_attention", "sliding_attention", "full_attention"]
    (folder / "config.json").write_text(json.dumps(config))
    mark(folder, 2)
    return folder


def save_table(folder: Path, most: int = 40, dtype: str = "float32") -> None:
    """The states of the most frequent n-grams of a text, as the model computes them here."""
    runner, config = opened(folder, LoadOptions(dtype=dtype, device="cpu")), read_config(folder)
    assert runner.lookup is not None
    index, count = frequent_windows(np.array(text(600)), VOCAB_SIZE, length=SEEN, most=most)
    states = runner.lookup.compute([index.gram(len(index) - count + number) for number in range(count)])
    StateTable.write(folder, config, load_weights(folder, config), index, states)


def opened(folder: Path, load: LoadOptions = FP32, capacity: int = 512) -> NativeRunner:
    runner = models.load(str(folder), load, cache_tokens=capacity)
    assert isinstance(runner, NativeRunner)
    return runner


def logits_of(runner: NativeRunner, tokens: list[int], name: int = 0) -> Tensor:
    runner.open(name, tokens, salt="alone")
    assert runner.reserve(name, len(tokens))
    found = runner.forward([Segment(name, tuple(tokens))]).logits_RV
    runner.release(name)
    return found


@pytest.fixture(scope="module")
def looked_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_looked_up(tmp_path_factory.mktemp("looked-up"))


def test_frequent_windows_are_found() -> None:
    """Those that counting by hand finds, with their places at the end of the index."""
    tokens = text(900)
    index, count = frequent_windows(np.array(tokens), VOCAB_SIZE, length=4, most=50)
    found = [index.gram(len(index) - count + number) for number in range(count)]
    counts = Counter(tuple(tokens[at : at + 4]) for at in range(len(tokens) - 3))
    assert len(set(found)) == count == 50
    assert min(counts[gram] for gram in found) >= max(each for gram, each in counts.items() if gram not in found)
    newest_first = np.array([gram[::-1] for gram in found])
    assert index.find(newest_first).tolist() == list(range(len(index) - count, len(index)))


@pytest.mark.parametrize("compiled", [True, False])
def test_logits_are_those_of_a_model_with_windows(
    looked_up: Path, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers runs all layers over the whole text; here it comes in two chunks."""
    if not compiled:
        monkeypatch.setenv(SWITCH, "0")
    runner, tokens = opened(looked_up), text(60, seed=3)
    assert ("compiled" in runner.spec.kernels.split(";")[0]) == compiled
    runner.open(0, tokens)
    assert runner.reserve(0, 64)
    first = runner.forward([Segment(0, tuple(tokens[:41]))]).logits_RV
    runner.keep(0, ())
    logits = torch.cat((first, runner.forward([Segment(0, tuple(tokens[41:]))]).logits_RV))
    plain = Qwen3ForCausalLM.from_pretrained(looked_up, dtype=torch.float32)
    with torch.no_grad():
        expected = plain(torch.tensor([tokens])).logits[0]
    assert torch.allclose(logits, expected, atol=1e-4 * float(logits.abs().max()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_state_is_the_same_kept_or_computed(
    looked_up: Path, compiled: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a tree beside siblings, as a chain, with all states kept or none, and with room for two alone."""
    if not compiled:
        monkeypatch.setenv(SWITCH, "0")
    load = LoadOptions(dtype=dtype, device="cpu")
    runner, tokens = opened(looked_up, load), text(21, seed=5)
    assert runner.lookup is not None
    tree = Tree((1, 2, 3, 4, 0, 1), (-1, -1, 0, 1, 2, 3))
    runner.open(0, tokens)
    assert runner.reserve(0, 64)
    rows = runner.forward([Segment(0, tuple(tokens), tree)]).logits_RV[len(tokens) :]
    small = opened(looked_up, LoadOptions(dtype=dtype, device="cpu", ngram_states=2))
    for path in ([0, 2, 4], [1, 3, 5]):
        chain = [*tokens, *(tree.tokens[node] for node in path)]
        kept = logits_of(runner, chain, 1)
        runner.lookup.kept.clear()
        assert logits_of(runner, chain, 1).equal(kept)
        assert logits_of(small, chain).equal(kept)
        assert kept[-3:].equal(rows[path])
    assert small.lookup is not None
    assert len(small.lookup.kept) == 2


def test_the_state_used_longest_ago_makes_room() -> None:
    """As in an ordered dictionary that is cut back after each call."""
    draw, kept, model = random.Random(0), RecentStates(300), OrderedDict[tuple[int, ...], float]()
    for _ in range(300):
        grams = list(dict.fromkeys((draw.randrange(500),) for _ in range(draw.randrange(1, 9))))
        slots = [kept.find(gram) for gram in grams]
        assert [slot is not None for slot in slots] == [gram in model for gram in grams]
        hits = [gram for gram in grams if gram in model]
        states = kept.read([slot for slot in slots if slot is not None]).flatten() if hits else []
        assert list(map(float, states)) == [model[gram] for gram in hits]
        for gram in hits:
            model.move_to_end(gram)
        new = [gram for gram in grams if gram not in model]
        values = [draw.random() for _ in new]
        kept.add(new, torch.tensor(values, dtype=torch.float64)[:, None])
        model.update(zip(new, values, strict=True))
        while len(model) > 300:
            model.popitem(last=False)
        assert len(kept) == len(model)


@pytest.mark.parametrize("compiled", [True, False])
def test_the_kit_passes_with_drafts(
    looked_up: Path, tmp_path: Path, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row has the bits of a fresh prefill on random walks, and drafted text is plain text."""
    if not compiled:
        monkeypatch.setenv(SWITCH, "0")
    draft = save_looked_up(tmp_path, seed=1)

    def open_runner(capacity: int, model: Path = looked_up) -> NativeRunner:
        return opened(model, LoadOptions(dtype="float32", device="cpu", ngram_states=20), capacity)

    with_layers = ("draft-model", "layer-skip:search=12,window=4")
    strategies = ("prompt-lookup", *(with_layers if compiled else ()))
    check_with_drafts(open_runner, lambda: open_runner(8192, draft), strategies, steps=12 if compiled else 3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_table_computed_ahead_changes_no_bit(tmp_path: Path, dtype: str) -> None:
    """What it has is not computed, and dtype auto is that of the table."""
    load, tokens = LoadOptions(dtype=dtype, device="cpu"), text(50)
    expected = logits_of(opened(save_looked_up(tmp_path), load), tokens)
    save_table(tmp_path, dtype=dtype)
    runner = opened(tmp_path, LoadOptions(device="cpu"))
    assert runner.lookup is not None
    assert runner.spec.dtype == dtype
    assert logits_of(runner, tokens).equal(expected)
    counts = runner.lookup.counts
    assert counts.rows == 50
    assert counts.mapped > 0
    assert counts.computed > 0
    assert counts.hits + counts.mapped + counts.computed >= 50


def damage(folder: Path, how: str) -> LoadOptions:
    """A table that is not the model's; returns how the model is loaded."""
    table = folder / STATES
    content = table.read_bytes()
    if how == "cut":
        table.write_bytes(content[:-5])
    elif how == "header":
        table.write_bytes(b"\xff" * 64)
    elif how == "other model":
        save_random("qwen3", folder / "other", seed=9)
        (folder / "other" / "model.safetensors").rename(folder / "model.safetensors")
    elif how == "other length":
        table.write_bytes(content.replace(b'"tokens":"5"', b'"tokens":"3"'))
    elif how == "other numbers":
        table.write_bytes(content[:-4] + b"\x00\x00\x80\x3f")
    elif how in ("circle", "long"):
        with safe_open(table, "pt") as file:
            metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        count = len(tensors["keys"])
        for place in range(count - (1 if how == "circle" else 6), count):  # goes on from itself, or the one before
            tensors["keys"][place] = (VOCAB_SIZE + place - (how == "long")) * VOCAB_SIZE
        save_file(tensors, table, metadata=metadata)
    elif how == "no shapes":
        table.write_bytes(content.replace(b'"shape":', b'"shap_":'))
    return LoadOptions(dtype="bfloat16", device="cpu") if how == "other type" else FP32


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("cut", "cut short"),
        ("header", "damaged or cut short"),
        ("other model", "is the table of another model"),
        ("other length", "n-grams of 3 tokens, and the model's first layers see 5"),
        ("other numbers", "states that this processor or build does not compute"),
        ("other type", "states in float32, and the model runs in bfloat16"),
        ("no shapes", "no shape of keys"),
        ("circle", "keys that are no n-grams'"),
        ("long", "keys that are no n-grams'"),
    ],
)
def test_a_table_that_is_not_the_models_is_one_line(tmp_path: Path, how: str, message: str) -> None:
    save_table(save_looked_up(tmp_path))
    with pytest.raises(ParlayError, match=message) as error:
        models.load(str(tmp_path), damage(tmp_path, how))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"sliding_window": 100}, "its first 2 layers see 199 tokens: 2 to 8"),
        ({"use_sliding_window": False, "layer_types": None}, "can be looked up"),
        ({"ngram_layers": 0}, "ngram_layers 0 of 3 layers"),
        ({"ngram_layers": 3}, "ngram_layers 3 of 3 layers"),
    ],
)
def test_layers_that_see_too_much_are_one_line(tmp_path: Path, said: dict[str, object], message: str) -> None:
    config = json.loads((save_looked_up(tmp_path) / "config.json").read_text()) | said
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ParlayError, match=message) as error:
        models.load(str(tmp_path), FP32)
    assert "\n" not in str(error.value)


def test_what_it_can_not_do_is_refused(looked_up: Path, tmp_path: Path) -> None:
    """A table without room, states for a model that keeps none, adapters by request, several ranks."""
    with pytest.raises(UsageError, match="ngram_states must be at least 1"):
        LoadOptions(ngram_states=0)
    save_random("llama", tmp_path)
    with pytest.raises(ParlayError, match="ngram_states can't be honoured"):
        models.load(str(tmp_path), LoadOptions(ngram_states=9))
    with pytest.raises(ParlayError, match="merge it with --lora"):
        opened(looked_up).read_adapter(tmp_path, "mine")
    with pytest.raises(ParlayError, match="which one process does"):
        Layout(2, 1, 1, 64).check("looked up", read_config(looked_up))
    assert not opened(looked_up).spec.features
