"""Trees that a head grows in one call of the compiled decoder are those that it grows level by level."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from parlay.compiled import structs
from parlay.compiled.build import LIBRARY
from parlay.compiled.library import NotLoaded, load
from parlay.drafters.heads.eagle3 import Eagle3
from parlay.drafters.heads.level_trees import DynamicTree
from parlay.drafters.options import EAGLE3
from parlay.heads import artefact
from parlay.heads.artefact import HeadArtefact
from parlay.heads.base import draft_ids
from parlay.heads.eagle3 import Eagle3Config, Eagle3Head
from parlay.heads.native import eagle3_decoder
from parlay.heads.opening import OpenHead, opened_artefact
from parlay.llm import LLM
from parlay.models.compiled.growing import GrownTrees
from parlay.models.forward import Growth, HeadRows, TreeRequest
from parlay.models.native import NativeRunner
from parlay.system import threads
from parlay.testing.checkpoints import VOCAB_SIZE
from parlay.testing.toy_tokenizers import toy_tokenizer
from parlay.text.prompts import TokensPrompt
from parlay.types import Draft, PickedRows, SamplingParams, Segment, SequenceView

try:
    load()
except NotLoaded as reason:
    pytest.skip(f"no compiled decoder: {reason}", allow_module_level=True)

_PROMPTS = [
    TokensPrompt(prompt_token_ids=[(7 * start + place) % VOCAB_SIZE for place in range(start)]) for start in (2, 9, 40)
]


_REPEATING = [
    TokensPrompt(prompt_token_ids=[3, 4, 5] * 30),
    TokensPrompt(prompt_token_ids=random.Random(2).choices(range(1, 6), k=90)),
    TokensPrompt(prompt_token_ids=random.Random(3).choices(range(1, 41), k=150)),
]


def drafts_of(
    model: Path,
    strategy: str,
    monkeypatch: pytest.MonkeyPatch,
    temperatures: Sequence[float] = (0, 0, 0),
    prompts: Sequence[TokensPrompt] = _PROMPTS,
) -> list[Draft]:
    """All drafts of three requests that decode together."""
    params = [SamplingParams(temperature=each, max_tokens=12, seed=5) for each in temperatures]
    found: list[Draft] = []
    propose = Eagle3.propose

    def recorded(self: Eagle3, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        drafts = propose(self, views, budgets)
        found.extend(draft for view, draft in zip(views, drafts, strict=True) if view.request.id != "proof")
        return drafts

    with (
        monkeypatch.context() as patched,
        LLM(str(model), tokenizer=toy_tokenizer(VOCAB_SIZE), dtype="float32", device="cpu") as llm,
    ):
        patched.setattr(Eagle3, "propose", recorded)
        llm.generate(prompts, params, strategy=strategy)
    return found


@pytest.fixture
def folder(head: HeadArtefact, tmp_path: Path) -> Path:
    artefact.save(tmp_path, head, "")
    return tmp_path


SHAPES = ("width=3,depth=3,min_p=0.0", "width=1,depth=4", "width=4,depth=1", "width=5,depth=4")
GREEDY, SAMPLED = (0, 0, 0), (0.7, 0, 1.3)
CASES = [(shape, budget, GREEDY) for shape, budget in zip(SHAPES, (30, 4, 1, 30), strict=True)] + [
    (shape, budget, SAMPLED) for shape, budget in zip(SHAPES, (4, 30, 30, 1), strict=True)
]
"""Every shape greedy and sampled, every budget greedy and sampled, and every shape with two budgets."""


@pytest.mark.parametrize(("shape", "budget", "temperatures"), CASES)
def test_one_call_grows_the_trees_that_levels_do(
    shape: str,
    budget: int,
    temperatures: tuple[float, ...],
    *,
    model: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Noise included, where a request samples."""
    strategy = f"eagle3:head={folder},policy=fixed,k={budget},{shape}"
    at_once = drafts_of(model, strategy, monkeypatch, temperatures)
    monkeypatch.setattr(NativeRunner, "grows", False)
    by_level = drafts_of(model, strategy, monkeypatch, temperatures)
    assert any(len(draft) > 1 for draft in at_once) or budget == 1
    assert [draft.tree for draft in at_once] == [draft.tree for draft in by_level]
    for one, other in zip(at_once, by_level, strict=True):
        assert one.scores == pytest.approx(other.scores, rel=1e-4)


@pytest.mark.parametrize("temperatures", [GREEDY, SAMPLED])
def test_one_call_favours_the_copies_that_levels_do(
    temperatures: tuple[float, ...], *, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In texts of few tokens, where copies agree in one token to eight, at more places and with more followers than
    count."""
    strategy = f"eagle3:head={folder},policy=fixed,k=12,width=3,depth=5,min_p=0.0"
    at_once = drafts_of(model, strategy, monkeypatch, temperatures, _REPEATING)
    without = drafts_of(model, f"{strategy},copies=false", monkeypatch, temperatures, _REPEATING)
    monkeypatch.setattr(NativeRunner, "grows", False)
    by_level = drafts_of(model, strategy, monkeypatch, temperatures, _REPEATING)
    assert [draft.tree for draft in at_once] == [draft.tree for draft in by_level]
    for one, other in zip(at_once, by_level, strict=True):
        assert one.scores == pytest.approx(other.scores, rel=1e-4)
    assert [draft.tree for draft in at_once] != [draft.tree for draft in without]


def test_what_does_not_run_could_not_have_been_drafted(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = f"eagle3:head={folder},policy=fixed,k=5,width=4,depth=4,min_p=0.0"
    found = drafts_of(model, strategy, monkeypatch)
    monkeypatch.setattr(NativeRunner, "grows", False)
    monkeypatch.setattr(DynamicTree, "_worst_drafted", lambda self: 0.0)
    assert [draft.tree for draft in found] == [draft.tree for draft in drafts_of(model, strategy, monkeypatch)]


@pytest.fixture
def delay() -> Iterator[Callable[[int, int, int], None]]:
    """Makes thread number N sleep for M microseconds in every K-th piece, after computing and before committing it."""
    set_delay = ctypes.CDLL(str(LIBRARY)).parlay_pool_delay
    set_delay.argtypes = [ctypes.c_int64] * 3
    yield set_delay
    set_delay(-1, 1, 0)


@pytest.mark.parametrize("late", [-1, 0, 1, 2])
def test_threads_and_late_ones_change_no_draft(
    late: int, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, delay: Callable[[int, int, int], None]
) -> None:
    strategy = f"eagle3:head={folder},policy=fixed,k=6,width=3,depth=3,min_p=0.0"
    with threads.using(1):
        expected = drafts_of(model, strategy, monkeypatch)
    with threads.using(3):
        delay(late, 3, 300)
        assert drafts_of(model, strategy, monkeypatch) == expected


def runner_of(head: HeadArtefact, opened: OpenHead) -> NativeRunner:
    """The runner of an opened head, whose weights live as long as ``opened``."""
    ids_D = draft_ids(head.tensors["d2t"])
    runner = opened.runner(EAGLE3, partial(eagle3_decoder, head.layer, head.operands, opened.embedding, ids_D))
    if not runner.grows:
        pytest.skip(runner.spec.kernels)
    return runner


def test_a_thread_that_is_late_in_reading_a_text_reads_nothing_afterwards(
    head: HeadArtefact, delay: Callable[[int, int, int], None]
) -> None:
    """The call returns without it. What the call had on its stack is overwritten before the thread goes on."""
    torch.manual_seed(0)
    layer = replace(head.layer, num_heads=64, num_kv_heads=64, head_dim=32)  # four pieces of keys and values
    made = Eagle3Head(Eagle3Config(layer, head.settings["draft_vocab_size"], head.settings["taps"]))
    wide = replace(head, layer=layer, tensors={**made.state_dict(), "d2t": head.tensors["d2t"]})
    opened = opened_artefact(wide, torch.zeros(VOCAB_SIZE, layer.hidden_size))
    runner, first = runner_of(wide, opened), opened.fuse.linear
    tokens = tuple(range(1, 41))
    features = [PickedRows(torch.ones(len(tokens), first.inputs), range(len(tokens)))]
    nested: list[object] = []
    for _ in range(900):
        nested = [nested]
    with threads.using(2):
        delay(1, 2, 1_000)  # the second thread's first piece of keys and values is number two
        for name in range(400):
            runner.open(name, tokens)
            assert runner.reserve(name, len(tokens))
            runner.read_text(Segment(name, tokens), first, features)
            assert repr(nested)  # which takes some hundred kilobytes of the stack
            time.sleep(0.002)
            runner.release(name)


def test_the_library_is_asked_for_no_more_nodes_than_it_keeps_apart() -> None:
    with pytest.raises(ValueError, match="1024 at most"):
        GrownTrees.of(1, structs.MOST_DRAFT + 1)


def with_features(growth: Growth, size: int, rows: Sequence[int]) -> Growth:
    """The growth with these rows of 99 features of another size."""
    assert growth.head is not None
    return growth._replace(head=growth.head._replace(features=[PickedRows(torch.zeros(99, size), rows)]))


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda growth: growth._replace(width=65), "of 65 rows"),
        (lambda growth: growth._replace(levels=0), "0 levels"),
        (lambda growth: growth._replace(head=growth.head._replace(tokens_D=torch.arange(3))), "3 tokens for"),
        (lambda growth: with_features(growth, 5, range(2)), "can't read rows"),
        (lambda growth: with_features(growth, growth.head.first.inputs, range(99)), "99 rows"),
        (lambda growth: with_features(growth, growth.head.first.inputs, [0, 99]), r"rows \[0, 99\] of 99 features"),
    ],
)
def test_growth_that_would_be_read_beyond_an_end_is_refused(
    head: HeadArtefact, edit: Callable[[Growth], Growth], told: str
) -> None:
    opened = opened_artefact(head, torch.zeros(VOCAB_SIZE, head.layer.hidden_size))
    runner, first = runner_of(head, opened), opened.fuse.linear
    runner.open(0, (1, 2))
    assert runner.reserve(0, 200)
    rows = HeadRows(draft_ids(head.tensors["d2t"]), first, [PickedRows(torch.zeros(2, first.inputs), range(2))])
    with pytest.raises(ValueError, match=told):
        runner.grow([Segment(0, (1, 2), logits_from=1)], edit(Growth(3, 2, 0.0, rows)), [TreeRequest(4)])
    with pytest.raises(ValueError, match="no nodes"):
        runner.grow([Segment(0, (1, 2), logits_from=1)], Growth(3, 2, 0.0, rows), [TreeRequest(0)])
