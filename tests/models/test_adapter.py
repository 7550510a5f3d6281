"""The adapter: whatever is drafted, kept, dropped, forked or batched, logits are those of plain forwards."""

from __future__ import annotations

import inspect
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, T5Config

from parlay.models import UnsupportedModel
from parlay.models.transformers_adapter.call import cache_argument
from parlay.models.transformers_adapter.runner import AdapterRunner
from parlay.testing.checkpoints import VOCAB_SIZE, random_model
from parlay.types import Exactness, Features, OutOfRoom, Segment, Skip, Tree, trees

TREE_MODELS = ["gpt2", "gpt-neox", "llama"]
HYBRIDS = ["lfm2", "qwen3-next", "qwen3.5", "granite-hybrid", "falcon-h1", "bamba"]
CHAIN_MODELS = ["bloom", "gemma2", "gemma4", "gpt-neo", *HYBRIDS]
SERIAL_MODELS = ["mamba"]
NO_TREE = Tree()


def plain(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """Logits ``[N, V]`` of a forward without cache: the oracle."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]


class Session:
    """One sequence driven the way the engine does it, every row checked against the oracle."""

    def __init__(self, model: PreTrainedModel, runner: AdapterRunner, number: int, prompt: Sequence[int]) -> None:
        self.model, self.runner, self.number = model, runner, number
        self.tokens = list(prompt)
        self.cached = 0

    def segment(self, tree: Tree = NO_TREE, upto: int | None = None) -> Segment:
        pending = tuple(self.tokens[self.cached : upto])
        return Segment(self.number, pending, tree, logits_from=len(pending) - 1)

    def check(self, segment: Segment, logits_RV: Tensor, tolerance: float) -> None:
        base = self.tokens[: self.cached + len(segment.pending)]
        expected = [plain(self.model, base)[-1]]
        for node in range(len(segment.tree)):
            path = [segment.tree.tokens[step] for step in trees.path_to(segment.tree, node)]
            expected.append(plain(self.model, base + path)[-1])
        assert float((logits_RV - torch.stack(expected)).abs().max()) <= tolerance

    def step(self, tree: Tree, path: Sequence[int], tolerance: float) -> None:
        segment = self.segment(tree)
        out = self.runner.forward([segment])
        self.check(segment, out.logits_RV, tolerance)
        self.commit(segment, path)

    def commit(self, segment: Segment, path: Sequence[int]) -> None:
        self.tokens += [segment.tree.tokens[node] for node in path] + [random.randrange(VOCAB_SIZE)]
        self.cached = self.runner.keep(self.number, path)
        assert self.cached < len(self.tokens)
        self.runner.check()


def opened(model: PreTrainedModel, runner: AdapterRunner, number: int, prompt: Sequence[int]) -> Session:
    session = Session(model, runner, number, prompt)
    session.cached = runner.open(number, prompt)
    return session


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)


def random_tree(size: int, branching: bool) -> Tree:
    parents = [random.randint(-1, node - 1) if branching else node - 1 for node in range(size)]
    return Tree(tuple(random.randrange(VOCAB_SIZE) for _ in range(size)), tuple(parents))


def random_path(tree: Tree) -> tuple[int, ...]:
    return trees.path_to(tree, random.randint(-1, len(tree) - 1))


def random_prompt(length: int) -> list[int]:
    return [random.randrange(VOCAB_SIZE) for _ in range(length)]


@pytest.mark.parametrize("name", TREE_MODELS + CHAIN_MODELS)
def test_every_row_of_a_drafted_session_has_the_logits_of_a_plain_forward(name: str) -> None:
    model = random_model(name)
    runner = AdapterRunner(model)
    assert runner.spec.tree == ("tree" if name in TREE_MODELS else "chain")
    assert runner.spec.exactness is Exactness.SEED
    session = opened(model, runner, 0, random_prompt(9))
    for _ in range(8):
        tree = random_tree(random.randint(0, 5), branching=name in TREE_MODELS)
        session.step(tree, random_path(tree), tolerance=1e-5 * 8)


@pytest.mark.parametrize("name", TREE_MODELS)
def test_in_float64_tree_rows_equal_plain_rows_to_twelve_digits(name: str) -> None:
    model = random_model(name, dtype=torch.float64)
    session = opened(model, AdapterRunner(model), 0, random_prompt(7))
    for _ in range(5):
        tree = random_tree(6, branching=True)
        session.step(tree, random_path(tree), tolerance=1e-12)


@pytest.mark.parametrize("name", SERIAL_MODELS)
def test_a_model_that_miscomputes_several_cached_rows_is_fed_one_by_one_and_refuses_drafts(name: str) -> None:
    model = random_model(name)
    runner = AdapterRunner(model)
    assert runner.spec.tree == "none"
    assert "several cached rows" in runner.spec.kernels
    session = opened(model, runner, 0, random_prompt(12))
    first = session.segment(upto=8)
    session.check(first, runner.forward([first]).logits_RV, tolerance=1e-5)
    session.cached = runner.keep(0, ())
    for _ in range(3):
        session.step(Tree(), (), tolerance=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "lfm2", "mamba"])
def test_a_forward_that_is_not_kept_leaves_no_trace(name: str) -> None:
    model = random_model(name)
    runner = AdapterRunner(model)
    session = opened(model, runner, 0, random_prompt(8))
    session.step(Tree(), (), tolerance=1e-5)
    draft = random_tree(0 if name == "mamba" else 4, branching=False)
    runner.forward([session.segment(draft)])
    session.step(Tree(), (), tolerance=1e-5)


@pytest.mark.parametrize("name", [*TREE_MODELS, "gemma2", "lfm2"])
def test_a_ragged_batch_equals_each_sequence_alone(name: str) -> None:
    model = random_model(name)
    runner = AdapterRunner(model)
    sessions = [opened(model, runner, number, random_prompt(3 + 5 * number)) for number in range(4)]
    for session in sessions[:3]:
        session.step(Tree(), (), tolerance=1e-5)  # the fourth joins with its whole prompt still pending
    for _ in range(4):
        drafts = [random_tree(random.randint(0, 4), branching=name in TREE_MODELS) for _ in sessions]
        segments = [session.segment(draft) for session, draft in zip(sessions, drafts, strict=True)]
        out = runner.forward(segments)
        for index, (session, segment) in enumerate(zip(sessions, segments, strict=True)):
            session.check(segment, out.logits_RV[out.starts[index] : out.starts[index + 1]], tolerance=1e-5)
        for session, segment, draft in zip(sessions, segments, drafts, strict=True):
            session.commit(segment, random_path(draft))


@pytest.mark.parametrize("name", ["gpt2", "bloom", "lfm2", "mamba"])
def test_truncated_and_forked_sequences_go_on_as_fresh_ones_would(name: str) -> None:
    model = random_model(name)
    runner = AdapterRunner(model)
    session = opened(model, runner, 0, random_prompt(10))
    session.step(Tree(), (), tolerance=1e-5)
    runner.fork(0, 1)
    twin = Session(model, runner, 1, session.tokens)
    twin.cached = session.cached
    session.cached = runner.truncate(0, 6)
    assert session.cached <= 6
    session.tokens = session.tokens[:6] + random_prompt(4)
    session.step(Tree(), (), tolerance=1e-5)
    twin.step(Tree(), (), tolerance=1e-5)
    runner.release(0)
    twin.step(Tree(), (), tolerance=1e-5)


@pytest.mark.parametrize("name", HYBRIDS)
def test_replayed_tokens_of_a_recurrent_model_are_fed_at_most_twice(name: str) -> None:
    """Rejected drafts must not make the pending run grow without bound."""
    model = random_model(name)
    session = opened(model, AdapterRunner(model), 0, random_prompt(5))
    session.step(Tree(), (), tolerance=5e-4)
    for _ in range(6):
        session.step(random_tree(3, branching=False), (0,), tolerance=5e-4)
        assert len(session.tokens) - session.cached <= 4


@pytest.mark.parametrize("name", ["gpt2", "lfm2"])
def test_taps_are_the_hidden_states_that_enter_the_named_layers(name: str) -> None:
    model = random_model(name)
    runner = AdapterRunner(model)
    prompts = [random_prompt(6), random_prompt(4)]
    for number, prompt in enumerate(prompts):
        runner.open(number, prompt)
    layers = (0, 2, runner.spec.num_layers)
    out = runner.forward([Segment(n, tuple(p), logits_from=len(p)) for n, p in enumerate(prompts)], taps=layers)
    assert len(out.logits_RV) == 0
    with torch.no_grad():
        states = [model(input_ids=torch.tensor([p]), output_hidden_states=True).hidden_states for p in prompts]
    for layer in layers:
        expected = torch.cat([state[layer][0] for state in states])
        torch.testing.assert_close(out.taps[layer], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(model.get_output_embeddings()(out.taps[layers[-1]])[5], plain(model, prompts[0])[5])


def test_wrong_masks_or_positions_cost_a_model_its_trees() -> None:
    """ALiBi takes no positions, and a model whose forward drops the mask is found out by trying."""

    class Deaf(type(random_model("gpt2"))):  # type: ignore[misc]
        def forward(self, input_ids=None, attention_mask=None, position_ids=None, cache=None, **rest):  # type: ignore[no-untyped-def]
            own = cache_argument("gpt2", inspect.signature(super().forward).parameters)
            return super().forward(input_ids=input_ids, position_ids=position_ids, **{own: cache}, **rest)

    model = random_model("gpt2")
    model.__class__ = Deaf
    spec = AdapterRunner(model).spec
    assert spec.tree == "chain"
    assert "its tree rows differ" in spec.kernels
    assert "position_ids" in AdapterRunner(random_model("bloom")).spec.kernels


def test_windows_that_go_by_places_in_the_cache_cost_a_model_its_trees_and_its_batches() -> None:
    """GPT-Neo's: of two texts, the shorter one would lose keys to the padding between them and the new rows."""
    model = random_model("gpt-neo")
    runner = AdapterRunner(model)
    sessions = [opened(model, runner, number, random_prompt(length)) for number, length in enumerate((70, 30))]
    for session in sessions:
        session.step(NO_TREE, (), tolerance=1e-5 * 8)
    segments = [session.segment(random_tree(3, branching=False)) for session in sessions]
    out = runner.forward(segments)
    for number, (session, segment) in enumerate(zip(sessions, segments, strict=True)):
        session.check(segment, out.logits_RV[out.starts[number] : out.starts[number + 1]], tolerance=1e-5 * 8)


def test_a_text_ends_where_positions_would_turn_by_other_factors() -> None:
    """Beyond it transformers chooses the factors of all rows of a call by the longest of its texts."""
    assert AdapterRunner(random_model("phi-moe")).spec.max_context == 64


def test_room_is_what_is_not_reserved_and_the_impossible_is_refused() -> None:
    runner = AdapterRunner(random_model("gpt2"), max_tokens_cached=100)
    runner.open(0, [1])
    runner.open(1, [1])
    assert runner.reserve(0, 60)
    assert runner.free_tokens() == 40
    assert not runner.reserve(1, 41)
    runner.release(0)
    assert runner.reserve(1, 41)
    with pytest.raises(OutOfRoom, match="101"):
        runner.reserve(1, 101)


def test_context_and_end_ids_come_from_the_model() -> None:
    spec = AdapterRunner(random_model("gpt2")).spec
    assert (spec.max_context, spec.eos_ids, spec.vocab_size) == (256, (2,), VOCAB_SIZE)


def test_models_without_a_usable_cache_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"Rwkv.*takes no cache"):
        AdapterRunner(random_model("rwkv"))
    with pytest.raises(UnsupportedModel, match="RecurrentGemma"):
        AdapterRunner(random_model("recurrent-gemma"))  # keeps its state in its modules
    config = T5Config(vocab_size=VOCAB_SIZE, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModel, match=r"T5.*encoder-decoder"):
        AdapterRunner(AutoModelForSeq2SeqLM.from_config(config))


@pytest.mark.parametrize(
    ("segment", "skipped", "words"),
    [
        (Segment(0, (1,)), frozenset({("mlp", 0)}), "skip sub-layers"),
        (Segment(0, (1,), features=Features(torch.zeros(1, 8))), frozenset(), "read features"),
        (Segment(0, (1,), base=-1), frozenset(), "run cached tokens again"),
        (Segment(0, (1, 2), logits_from=1, base=1), frozenset(), "left no 1 rows"),
    ],
    ids=["layers", "features", "cached tokens", "rows that did not run"],
)
def test_what_the_adapter_can_not_run_is_said(segment: Segment, skipped: Skip, words: str) -> None:
    runner = AdapterRunner(random_model("gpt2"))
    runner.open(0, (1, 2, 3))
    with pytest.raises(ValueError, match=words):
        runner.forward([segment], skip=skipped)
