"""Which rows of the native decoder run and through which sub-layers: they compute what they should, change nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from parlay.compiled.library import SWITCH
from parlay.models.config import DecoderConfig
from parlay.models.forward import ForwardBatch, ForwardOutput
from parlay.models.native import NativeRunner
from parlay.testing.checkpoints import VOCAB_SIZE, random_model
from parlay.types import NO_SKIP, NO_TREE, Exactness, Features, Segment, Skip, Tree, trees

CONFIG = DecoderConfig(
    architecture="LlamaForCausalLM", vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_layers=3,
    num_heads=4, num_kv_heads=2, head_dim=8, rms_norm_eps=1e-6, max_context=512,
)  # fmt: skip
PART: Skip = frozenset({("attention", 1), ("mlp", 1), ("mlp", 2)})
TEXT = [7 * place % VOCAB_SIZE for place in range(60)]


def make(dtype: torch.dtype, skip: Skip = NO_SKIP) -> NativeRunner:
    """The runner; with ``skip``, one whose sub-layers of these names add nothing, though they run."""
    weights = {name: tensor.to(dtype).clone() for name, tensor in random_model("llama").state_dict().items()}
    for half, layer in skip:
        last = "self_attn.o_proj" if half == "attention" else "mlp.down_proj"
        weights[f"model.layers.{layer}.{last}.weight"].zero_()
    return NativeRunner(CONFIG, weights, dtype=dtype, device=torch.device("cpu"), max_tokens_cached=4096, name="tiny")


@pytest.fixture(params=["compiled", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setenv(SWITCH, "0")


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest, kernels: None) -> torch.dtype:
    chosen: torch.dtype = request.param
    if make(chosen).spec.exactness is not Exactness.BITS:
        pytest.skip("on this machine rows are exact up to numerical noise only")
    return chosen


def opened(runner: NativeRunner, name: int, tokens: Sequence[int], cached: int, room: int = 40) -> None:
    """A sequence that holds the first ``cached`` tokens, and has room for the others and some more."""
    runner.open(name, tokens, salt=str(name))
    assert runner.reserve(name, len(tokens) + room)
    if cached:
        runner.forward([Segment(name, tuple(tokens[:cached]), logits_from=cached)])
        runner.keep(name, ())


def rest(name: int, tokens: Sequence[int], cached: int, start: int, rows: int = 1) -> Segment:
    """All that is not cached of a text, of which rows from position ``start`` on run and the last ones want logits."""
    pending = tuple(tokens[cached:])
    return Segment(name, pending, logits_from=len(pending) - rows, base=start - cached)


def test_what_is_skipped_adds_nothing(dtype: torch.dtype) -> None:
    """The logits are those of a model whose skipped sub-layers end in zeros, to the last bit."""
    runner, other = make(dtype), make(dtype, PART)
    opened(runner, 0, TEXT, 0)
    opened(other, 0, TEXT, 0)
    skipped = runner.forward([Segment(0, tuple(TEXT))], skip=PART).logits_RV
    assert torch.equal(skipped, other.forward([Segment(0, tuple(TEXT))]).logits_RV)


def test_with_nothing_skipped_the_logits_are_the_targets(dtype: torch.dtype) -> None:
    runner = make(dtype)
    opened(runner, 0, TEXT, 50)
    again = runner.forward([rest(0, TEXT, 50, 20, rows=40)]).logits_RV
    opened(runner, 1, TEXT, 0)
    assert torch.equal(again, runner.forward([Segment(1, tuple(TEXT), logits_from=20)]).logits_RV)


def test_with_everything_skipped_a_row_sees_its_own_token_only(dtype: torch.dtype) -> None:
    runner = make(dtype)
    opened(runner, 0, TEXT, 30)
    opened(runner, 1, TEXT[::-1], 30)
    every = frozenset(runner.spec.sublayers)
    both = runner.forward([Segment(0, (5, 9), logits_from=1), Segment(1, (9,))], skip=every).logits_RV
    assert torch.equal(both[0], both[1])


@pytest.mark.parametrize("taps", [(), (1,), (1, 3)], ids=str)
def test_logits_are_the_same_whichever_other_rows_have_some(dtype: torch.dtype, taps: tuple[int, ...]) -> None:
    """Rows without logits need not pass the last layer, beside rows of other sequences and a tree that do."""
    runner = make(dtype)
    for name in range(6):
        opened(runner, name, TEXT, 0 if name % 3 < 2 else 50)
    texts = [TEXT, TEXT[:7], TEXT[50:]]
    every = [Segment(name, tuple(text), WHOLE if name == 2 else NO_TREE) for name, text in enumerate(texts)]
    some = [each._replace(sequence=each.sequence + 3, logits_from=len(each.pending) - 1) for each in every]
    whole, part = runner.forward(every, taps), runner.forward(some, taps)
    assert torch.equal(part.logits_RV, whole.logits_RV[[59, 66, *range(76, 91)]])
    assert all(torch.equal(part.taps[tap], whole.taps[tap]) for tap in taps)
    after = []
    for name in range(6):
        runner.keep(name, (0, 2) if name % 3 == 2 else ())
        after.append(runner.forward([Segment(name, (7,))]).logits_RV)
    assert all(torch.equal(after[name], after[name + 3]) for name in range(3))


WHOLE = Tree(tuple(range(20, 34)), (-1, -1, 0, 0, 1, 3, 2, 2, 5, 5, 8, 9, 9, 11))
LEVELS = [(0, 10), (7, 12), (12, 16), (16, 18), (18, 19), (19, 24)]
"""Rows that run from and to; the first ten are pending tokens."""


def grown(name: int, base: int, end: int) -> Segment:
    """Rows of ten pending tokens and of nodes of `WHOLE`."""
    tree = Tree(WHOLE.tokens[: end - 10], WHOLE.parents[: end - 10])
    return Segment(name, tuple(TEXT[50:]), tree, logits_from=base, base=base)


@pytest.mark.parametrize("skip", [NO_SKIP, PART], ids=["all", "part"])
def test_a_tree_that_runs_level_by_level_is_the_tree_at_once(dtype: torch.dtype, skip: Skip) -> None:
    """Rows that the last forward left serve the next, whatever runs beside them."""
    runner = make(dtype)
    for name in range(3):
        opened(runner, name, TEXT, 50)
    at_once = runner.forward([grown(0, 0, 24)], skip=skip).logits_RV
    for base, end in LEVELS:
        segments = [Segment(2, (1, 2), logits_from=2), grown(1, base, end)]
        out = runner.forward(segments, (1,), skip)
        assert torch.equal(at_once[base:end], out.logits_RV)
        assert len(out.taps[1]) == 2 + end - base


def test_what_ran_level_by_level_is_kept_as_if_at_once(dtype: torch.dtype) -> None:
    runner = make(dtype)
    for name in range(2):
        opened(runner, name, TEXT, 50)
    runner.forward([grown(0, 0, 24)])
    for base, end in LEVELS:
        runner.forward([grown(1, base, end)])
    path = (0, 3, 5, 9, 11)
    after = []
    for name in range(2):
        assert runner.keep(name, path) == 65
        runner.check()
        after.append(runner.forward([Segment(name, (7,))]).logits_RV)
    assert torch.equal(*after)


def test_cached_tokens_can_run_again_beside_new_ones_that_are_kept(dtype: torch.dtype) -> None:
    runner = make(dtype)
    for name in range(2):
        opened(runner, name, TEXT, 50)
    whole = runner.forward([Segment(0, tuple(TEXT[50:]), WHOLE)], (1,))
    again = runner.forward([Segment(1, tuple(TEXT[50:]), WHOLE, logits_from=0, base=-30)], (1,))
    assert torch.equal(whole.logits_RV, again.logits_RV)
    assert torch.equal(whole.taps[1], again.taps[1][30:])
    assert [runner.keep(name, (1, 4)) for name in range(2)] == [62, 62]
    after = [runner.forward([Segment(name, (7,))]).logits_RV for name in range(2)]
    assert torch.equal(*after)


def embeddings(dtype: torch.dtype, tokens: Sequence[int]) -> Tensor:
    return random_model("llama").get_input_embeddings()(torch.tensor(tokens)).detach().to(dtype)


def test_features_are_read_in_place_of_the_tokens_of_the_last_rows(dtype: torch.dtype) -> None:
    """Features of other tokens give these tokens' logits; rows before them, and other sequences, read their own."""
    runner = make(dtype)
    for name in range(3):
        opened(runner, name, TEXT, 50)
    plain = runner.forward([Segment(0, (1, 2), Tree((3, 4, 5), (-1, -1, 1)))]).logits_RV
    given = Features(embeddings(dtype, (2, 3, 4, 5)))
    segments = [Segment(2, (9,)), Segment(1, (1, 0), Tree((0, 0, 0), (-1, -1, 1)), features=given)]
    assert torch.equal(plain, runner.forward(segments).logits_RV[1:])


def test_features_can_be_added_to_what_the_tokens_are(dtype: torch.dtype) -> None:
    runner = make(dtype)
    for name in range(2):
        opened(runner, name, TEXT, 50)
    given = embeddings(dtype, (2, 3))
    summed = Features((given + embeddings(dtype, (6, 7))).to(dtype))
    one = runner.forward([Segment(0, (1, 6, 7), features=Features(given, added=True))]).logits_RV
    other = runner.forward([Segment(1, (1, 0, 0), features=summed)]).logits_RV
    torch.testing.assert_close(one, other, rtol=0, atol=0.05 if dtype == torch.bfloat16 else 1e-5)


def test_rows_that_skip_sub_layers_do_not_depend_on_their_company(dtype: torch.dtype) -> None:
    runner = make(dtype)
    for name, cached in ((0, 50), (1, 33), (2, 7)):
        opened(runner, name, TEXT, cached)
    segments = [rest(0, TEXT, 50, 50, rows=2), rest(1, TEXT, 33, 33, rows=27), rest(2, TEXT[:20], 7, 4, rows=1)]
    together = runner.forward(segments, skip=PART).logits_RV
    assert torch.equal(together, torch.cat([runner.forward([one], skip=PART).logits_RV for one in segments]))


def later_logits(runner: NativeRunner, disturb: bool) -> list[Tensor]:
    """Steps with trees and partial acceptance, forks and a reused prefix; between them other forwards, or none."""
    runner.open(0, TEXT)
    assert runner.reserve(0, len(TEXT) + 40)
    seen: list[Tensor] = []
    cached, skips = 0, itertools.cycle([PART, NO_SKIP, frozenset(runner.spec.sublayers)])
    for length in (20, 41, 42, 60):
        fed = tuple(TEXT[cached:length])
        tree = Tree((3, 4, 5, 6), (-1, 0, -1, 2)) if length != 41 else trees.chain_tree((8, 9))
        if disturb:
            for back in (0, min(cached, 17), cached):
                skip = next(skips)
                runner.forward([Segment(0, (*TEXT[cached:length], 11, 12, 13), base=-back)], skip=skip)
                runner.check()
        seen.append(runner.forward([Segment(0, fed, tree)]).logits_RV)
        cached = runner.keep(0, ())
    runner.fork(0, 1)
    if disturb:
        runner.forward([Segment(0, (5,), base=20 - len(TEXT))], skip=PART)
    runner.release(0)
    assert runner.open(2, [*TEXT, 1]) == len(TEXT), "the prefix is reusable as before"
    for name in (1, 2):
        assert runner.reserve(name, len(TEXT) + 1)
        seen.append(runner.forward([Segment(name, (1,))]).logits_RV)
    runner.check()
    return seen


def test_nothing_later_differs_by_a_bit(dtype: torch.dtype) -> None:
    """Cached rows are put back, scratch rows written anew (U5): logits are those of a run without such forwards."""
    undisturbed = later_logits(make(dtype), disturb=False)
    for before, after in zip(undisturbed, later_logits(make(dtype), disturb=True), strict=True):
        assert torch.equal(before, after)


def test_a_forward_that_skips_can_not_be_kept() -> None:
    """Neither can one before it, whose rows it may have overwritten."""
    runner = make(torch.float32)
    opened(runner, 0, TEXT, 50)
    runner.forward([Segment(0, (1,))])
    runner.forward([Segment(0, (1,))], skip=PART)
    with pytest.raises(AssertionError, match="can't be kept"):
        runner.keep(0, ())


def test_cached_rows_come_back_even_if_the_forward_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make(torch.float32)
    opened(runner, 0, TEXT, 50)
    before = runner.forward([Segment(0, (1,))]).logits_RV
    run = runner._forward.run

    def fail(work: ForwardBatch) -> ForwardOutput:
        run(work)
        raise RuntimeError("out of luck")

    with monkeypatch.context() as broken:
        broken.setattr(runner._forward, "run", fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            runner.forward([Segment(0, (1,), base=-40)], skip=frozenset({("attention", 1)}))
    assert torch.equal(before, runner.forward([Segment(0, (1,))]).logits_RV)


@pytest.mark.parametrize(
    ("one", "skip", "words"),
    [
        (Segment(0, (1,)), frozenset({("mlp", 3)}), "can't be skipped: layers are 0 to 2"),
        (Segment(0, (VOCAB_SIZE,)), PART, "not in the vocabulary"),
        (Segment(1, (1,)), PART, "reserve them first"),
        (Segment(0, (1,) * 480), NO_SKIP, "beyond the context of 512"),
        (Segment(0, (1,), trees.chain_tree([1] * 480)), PART, "beyond the context of 512"),
        (Segment(9, (1,)), PART, "sequence 9 is not open"),
        (Segment(0, (1,), base=-51), PART, "50 cached tokens: 51 of them can't run again"),
        (Segment(0, (1, 2), logits_from=1, base=1), NO_SKIP, "run them again"),
        (Segment(0, (1, 2), logits_from=-1), NO_SKIP, "logits from row -1 on, but rows 0 to 2 run"),
        (Segment(0, (1,), features=Features(torch.zeros(2, 32))), NO_SKIP, "features of 2 rows and 32 numbers"),
        (Segment(0, (1,), features=Features(torch.zeros(1, 8))), NO_SKIP, "1 rows of 32"),
    ],
)
def test_what_can_not_be_run_is_said(one: Segment, skip: Skip, words: str) -> None:
    runner = make(torch.float32)
    opened(runner, 0, TEXT, 50, room=500)
    runner.open(1, [1])
    with pytest.raises(ValueError, match=words):
        runner.forward([one], skip=skip)
    runner.check()


def test_rows_of_a_chain_see_their_own_chain_and_no_other(dtype: torch.dtype) -> None:
    """Below each node stands what would stand there alone, to the last bit; the nodes do not notice."""
    runner, masks = make(dtype), (9, 9, 9)
    opened(runner, 0, TEXT[:20], 17)
    nodes = Tree((5, 6, 7), (-1, 0, 0))
    tree = Tree((*nodes.tokens, *masks, *masks), (*nodes.parents, -1, 3, 4, 2, 6, 7))
    pending = tuple(TEXT[17:20])
    out = runner.forward([Segment(0, pending, tree, 2, together=6)]).logits_RV
    assert torch.equal(out[:4], runner.forward([Segment(0, pending, nodes, 2)]).logits_RV)
    below_root = runner.forward([Segment(0, pending, trees.chain_tree(masks), 3, together=3)]).logits_RV
    below_node = runner.forward([Segment(0, pending, trees.chain_tree((5, 7, *masks)), 5, together=3)]).logits_RV
    assert torch.equal(out[4:], torch.cat([below_root, below_node]))
    assert not torch.equal(out[4], runner.forward([Segment(0, pending, trees.chain_tree((9,)), 3)]).logits_RV[0])
    runner.check()


@pytest.mark.parametrize(
    ("tree", "together", "base"),
    [
        (trees.chain_tree((1, 2)), 3, 0),
        (Tree((1, 2, 3, 4), (-1, 0, 0, 1)), 3, 0),
        (trees.chain_tree((1, 2, 3)), 3, 4),
    ],
    ids=["more than nodes", "no chains", "not all run"],
)
def test_rows_that_cannot_see_each_other_are_an_error(tree: Tree, together: int, base: int) -> None:
    runner = make(torch.float32)
    opened(runner, 0, TEXT[:5], 2)
    if base:
        runner.forward([Segment(0, tuple(TEXT[2:5]), tree)])
    with pytest.raises(ValueError, match="can't see each other"):
        runner.forward([Segment(0, tuple(TEXT[2:5]), tree, logits_from=base, base=base, together=together)])
