"""Walking a tree with the shared noise commits what plain decoding commits, and nothing else."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parlay.sampling.rules import SharedNoise
from parlay.testing import reference
from parlay.testing.reference import ReferenceText
from parlay.types import Draft, Fault, NoiseKey, Request, SamplingParams, Tree, Verdict, trees

MakeView = Callable[..., ReferenceText]

VOCAB = 4


def logits_of(ids: Sequence[int]) -> torch.Tensor:
    """Random, and different after every text."""
    generator = torch.Generator().manual_seed(zlib.crc32(bytes(ids)))
    return 2 * torch.randn(VOCAB, generator=generator)


def rotate(ids: list[int], logits_V: torch.Tensor) -> torch.Tensor:
    return logits_V.roll(sum(ids))


VARIETY = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.5),
    SamplingParams(top_p=0.8, temperature=0.8),
    SamplingParams(top_k=3, temperature=0.8),
    SamplingParams(repetition_penalty=1.8, presence_penalty=1.0),
    SamplingParams(temperature=0, frequency_penalty=1.5),
    SamplingParams(temperature=0, min_tokens=3),
    SamplingParams(logits_processors=[rotate], top_k=3),
]


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    """Trees of up to 14 nodes whose equal siblings are merged, some of them ending in probes."""
    tokens: list[int] = []
    parents: list[int] = []
    for token in draw(st.lists(st.integers(0, VOCAB - 1), max_size=14)):
        parent = draw(st.integers(-1, len(tokens) - 1))
        if (token, parent) not in zip(tokens, parents, strict=True):
            tokens.append(token)
            parents.append(parent)
    leaves = 0
    while leaves < len(tokens) and len(tokens) - 1 - leaves not in parents:
        leaves += 1
    draft = Draft(Tree(tuple(tokens), tuple(parents)), sources=("test",) * len(tokens))
    return replace(draft, probes=draw(st.integers(0, leaves)))


def rows_of(text: ReferenceText, draft: Draft) -> torch.Tensor:
    """Logits of the root and of every node, each after its own path."""
    paths = [(), *(trees.path_to(draft.tree, node) for node in range(len(draft)))]
    return torch.stack([logits_of([*text.tokens, *(draft.tree.tokens[node] for node in path)]) for path in paths])


def longest_match(draft: Draft, tokens: Sequence[int]) -> tuple[int, ...]:
    """The longest path from the root that spells the tokens, probes left out."""
    real = range(len(draft) - draft.probes)
    paths = [(), *(trees.path_to(draft.tree, node) for node in real)]
    spelt = [path for path in paths if [draft.tree.tokens[node] for node in path] == list(tokens[: len(path)])]
    return max(spelt, key=len)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(drafts(), st.sampled_from(VARIETY), st.integers(0, 1000)), min_size=1, max_size=4))
def test_a_walk_commits_the_tokens_of_step_by_step_decoding(jobs: list[tuple[Draft, SamplingParams, int]]) -> None:
    """Any trees, any mixture of requests in one call, rows of strangers between them."""
    texts, rows, roots = [], [], []
    for draft, params, seed in jobs:
        prompt = (seed % VOCAB, 1)
        stop_ids = frozenset({2})  # masked for requests with min_tokens; the rule itself stops for nothing
        request = Request(id="test", prompt=prompt, params=params, key=NoiseKey(seed), stop_ids=stop_ids)
        texts.append(ReferenceText(request, [*prompt, 3], 2))
        roots.append(sum(len(part) for part in rows) + 2)
        rows += [torch.full((2, VOCAB), torch.nan), rows_of(texts[-1], draft)]
    verdicts = SharedNoise().accept(texts, [draft for draft, _, _ in jobs], torch.cat(rows), roots)
    for text, (draft, params, _), verdict in zip(texts, jobs, verdicts, strict=True):
        plain = plain_tokens(text, params, 15)
        path = longest_match(draft, plain)
        assert verdict == Verdict(path, tuple(plain[: len(path) + 1]))


@pytest.mark.parametrize("wrong", [0, 1, 2, 5, 6, 13, 14, 20])
def test_chains_whose_rows_are_truncated_together_give_the_tokens_of_step_by_step_decoding(wrong: int) -> None:
    """However deep the first wrong node lies, and beside a sequence that ends at once."""
    texts, drafts, rows, roots = [], [], [], []
    for seed, (params, right) in enumerate(product(TRUNCATED, (wrong, 0))):
        text = ReferenceText(
            Request(id="test", prompt=(seed % VOCAB,), params=params, key=NoiseKey(seed)), [seed % VOCAB], 1
        )
        plain = plain_tokens(text, params, 20)
        tokens = [token if place < right else (token + 1) % VOCAB for place, token in enumerate(plain)]
        drafts.append(trees.chain(tokens, "test"))
        roots.append(sum(len(part) for part in rows))
        rows.append(rows_of(text, drafts[-1]))
        texts.append((text, tuple(plain_tokens(text, params, right + 1)), right))
    verdicts = SharedNoise().accept([text for text, _, _ in texts], drafts, torch.cat(rows), roots)
    assert verdicts == [Verdict(tuple(range(right)), plain) for _, plain, right in texts]


TRUNCATED = [
    SamplingParams(top_k=3),
    SamplingParams(top_p=0.8, temperature=0.8),
    SamplingParams(top_k=4, top_p=0.9, temperature=2),
    SamplingParams(top_k=3, repetition_penalty=1.3),  # one by one
]


def plain_tokens(text: ReferenceText, params: SamplingParams, count: int) -> list[int]:
    """What the reference decoder says after the text's tokens; it stops for nothing."""
    unended = ReferenceText(
        replace(text.request, params=replace(params, max_tokens=None)), list(text.tokens), text.prompt_length
    )
    while len(unended.tokens) < len(text.tokens) + count:
        unended.tokens.append(reference.draw(reference.process(logits_of(unended.tokens), unended, ()), unended))
    return unended.tokens[len(text.tokens) :]


def test_the_distribution_of_a_walk_is_that_of_plain_decoding(view: MakeView) -> None:
    """Joint frequencies of two tokens through a tree that covers some of them, against the product of softmaxes."""
    draft = Draft(Tree((0, 1, 2, 0, 3), (-1, -1, 0, 1, 1)), sources=("test",) * 5)
    draws = 6000
    views = [view(SamplingParams(temperature=4), prompt=[1], seed=seed) for seed in range(draws)]
    rows_RV = rows_of(views[0], draft)
    verdicts = SharedNoise().accept(views, [draft] * draws, rows_RV.repeat(draws, 1), range(0, draws * 6, 6))
    counts = Counter(verdict.sampled[:2] for verdict in verdicts if isinstance(verdict, Verdict))
    root, *below = (rows_RV / 4).softmax(-1).tolist()
    expected = {(first, second): root[first] * below[first][second] for first in (0, 1) for second in range(VOCAB)}
    expected |= {(first,): root[first] for first in (2, 3)}  # the tree ends before these
    assert counts.keys() <= expected.keys()
    statistic = sum((counts[text] - draws * prob) ** 2 / (draws * prob) for text, prob in expected.items())
    assert statistic < 36  # 9 degrees of freedom: less than one in 10,000


def test_an_empty_draft_gives_one_token(view: MakeView) -> None:
    verdict = SharedNoise().accept([view(SamplingParams(temperature=0))], [Draft()], torch.tensor([[0.0, 1.0]]), [0])
    assert verdict == [Verdict((), (1,))]


@pytest.mark.parametrize("temperature", [0, 1])
def test_faults_stay_with_their_sequence_and_rows_off_the_walk_can_not_fault(
    temperature: float, view: MakeView
) -> None:
    """Logits that force token 1; NaN at one root, at a node on a walk, and at a node beside one.

    What a walk drew above its fault is committed first, as in plain decoding.
    """
    logits_RV = torch.full((8, 4), -50.0)
    logits_RV[:, 1] = 50
    logits_RV[[0, 3, 7]] = torch.nan
    params = SamplingParams(temperature=temperature)
    taken, missed = trees.chain([1], "test"), Draft(Tree((1, 2), (-1, -1)), sources=("test",) * 2)
    at_root, below, fine = SharedNoise().accept([view(params)] * 3, [taken, taken, missed], logits_RV, [0, 2, 5])
    assert isinstance(at_root, Fault)
    assert "NaN" in at_root.reason
    assert below == Verdict((), (1,))
    assert fine == Verdict((0,), (1, 1))


def test_processors_run_only_on_rows_that_the_walk_visits(view: MakeView) -> None:
    seen: list[list[int]] = []

    def spy(ids: list[int], logits_V: torch.Tensor) -> torch.Tensor:
        seen.append(ids)
        return logits_V

    text = view(SamplingParams(temperature=0, logits_processors=[spy]), prompt=[3])
    draft = Draft(Tree((0, 1, 1, 2), (-1, -1, 1, 1)), sources=("test",) * 4)
    logits_RV = torch.eye(4)[[1, 0, 2, 0, 3]]
    assert SharedNoise().accept([text], [draft], logits_RV, [0]) == [Verdict((1, 3), (1, 2, 3))]
    assert seen == [[3], [3, 1], [3, 1, 2]]


def test_probes_are_never_accepted(view: MakeView) -> None:
    draft = replace(trees.chain([1, 1], "test"), probes=1)
    logits_RV = torch.eye(4)[[1, 1, 1]]
    verdict = SharedNoise().accept([view(SamplingParams(temperature=0))], [draft], logits_RV, [0])
    assert verdict == [Verdict((0,), (1, 1))]


@pytest.mark.parametrize("kind", ["iid", "without_replacement"])
def test_drafts_that_were_drawn_are_refused(kind: str, view: MakeView) -> None:
    draft = replace(trees.chain([1], "test"), kind=kind)
    with pytest.raises(ValueError, match=f"SharedNoise can't judge drafts of kind '{kind}'"):
        SharedNoise().accept([view(SamplingParams())], [draft], torch.zeros(2, 4), [0])


def test_half_precision_walks_equal_float32_walks(view: MakeView) -> None:
    chance = random.Random(1)
    draft = trees.chain([chance.randrange(VOCAB) for _ in range(6)], "test")
    rows_RV = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(2)).bfloat16()
    for params in VARIETY:
        text = view(params, seed=3)
        wide, half = (SharedNoise().accept([text], [draft], rows, [0]) for rows in (rows_RV.float(), rows_RV))
        assert wide == half
