"""REST: the most frequent continuations of the longest match, as a tree; against a naive search, and in an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlay.drafters.copying.prompt_lookup import PromptLookup, PromptLookupOptions
from parlay.drafters.resources import Resources
from parlay.drafters.stores.datastore import Retrieval
from parlay.drafters.stores.datastore import RetrievalOptions as Options
from parlay.drafters.stores.datastore_file import BadDatastore, Datastore, fingerprint
from parlay.models.fetch.resolving import resolve
from parlay.models.loading import load_tokenizer
from parlay.options import UsageError
from parlay.strategies.building import build
from parlay.strategies.spelling import parse
from parlay.testing.conformance.stage import PLAIN, Stage, StageRequest, Subject, decode
from parlay.testing.conformance.stages import toy_stage
from parlay.types import NO_DRAFT, Draft, NoiseKey, Request, SamplingParams, trees
from tests.drafters.sight import no_runner

VOCAB = 50


def resources_of(documents: Sequence[Sequence[int]], vocab_size: int = VOCAB) -> Resources:
    store = Datastore.build([np.array(document) for document in documents], vocab_size)
    return Resources(vocab_size, no_runner, open_datastore=lambda _: store)


@dataclass
class Sight:
    tokens: Sequence[int]
    sequence: int = 0
    request: Request = Request(id="r", prompt=(0,), params=SamplingParams(), key=NoiseKey(0))  # noqa: RUF009 - frozen
    prompt_length: int = 1


def propose(documents: Sequence[Sequence[int]], tokens: Sequence[int], budget: int = 64, **settings: int) -> Draft:
    drafter = Retrieval(resources_of(documents), Options(file="a store", **settings))
    return drafter.propose([Sight(tokens)], [budget])[0]


def paths(draft: Draft) -> list[tuple[int, ...]]:
    """The tokens from below the root down to each node."""
    return [tuple(draft.tree.tokens[above] for above in trees.path_to(draft.tree, node)) for node in range(len(draft))]


def counted(
    documents: Sequence[Sequence[int]], tokens: Sequence[int], branch: int, shortest: int
) -> Counter[tuple[int, ...]]:
    """How often each prefix follows the longest end of ``tokens`` that something follows, by looking everywhere."""
    for size in range(min(16, len(tokens)), shortest - 1, -1):
        counts: Counter[tuple[int, ...]] = Counter()
        for document in documents:
            for place in range(len(document) - size):
                if list(document[place : place + size]) == list(tokens[-size:]):
                    after = document[place + size : place + size + branch]
                    counts.update(tuple(after[:depth]) for depth in range(1, len(after) + 1))
        if counts:
            return counts
    return Counter()


letters = st.lists(st.integers(0, 2), max_size=20)


@given(
    documents=st.lists(letters, min_size=1, max_size=4).filter(any),
    tokens=letters.filter(bool),
    branch=st.integers(1, 4),
    shortest=st.integers(1, 3),
    budget=st.integers(1, 12),
)
def test_the_most_frequent_prefixes_are_kept_and_form_a_tree(
    documents: list[list[int]], tokens: list[int], branch: int, shortest: int, budget: int
) -> None:
    """Ties included: with a prefix every shorter one is kept, and none that is left out is more frequent."""
    draft = propose(documents, tokens, budget, branch=branch, min_match=shortest)
    counts = counted(documents, tokens, min(branch, budget), shortest)
    kept = paths(draft)
    assert len(set(kept)) == len(kept) == min(budget, len(counts))
    assert all(not path[:-1] or path[:-1] in kept[:place] for place, path in enumerate(kept))
    left_out = set(counts) - set(kept)
    assert set(kept) <= set(counts)
    assert min((counts[path] for path in kept), default=0) >= max((counts[path] for path in left_out), default=0)
    assert len(draft.scores) == len(draft.sources) == len(draft)
    assert all(0 < score < 1 for score in draft.scores)


def test_siblings_are_scored_by_their_share_of_the_matches() -> None:
    documents = [[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 4]]
    draft = propose(documents, [1, 2])
    by_path = dict(zip(paths(draft), draft.scores, strict=True))
    assert list(by_path) == [(3,), (4,)]
    assert by_path[(3,)] > 0.5 > by_path[(4,)]
    assert sum(by_path.values()) < 1


def test_one_match_is_the_surer_the_longer_it_is_and_so_is_each_token_after_it() -> None:
    documents = [list(range(30))]
    short, long = propose(documents, [5, 6]), propose(documents, list(range(12)))
    assert trees.is_chain(long.tree)
    assert list(long.scores) == sorted(long.scores)
    assert short.scores[0] < long.scores[0] < 1


def test_the_longest_match_alone_is_counted() -> None:
    documents = [[9, 1, 2, 5], *[[1, 2, 6]] * 7]
    assert paths(propose(documents, [9, 1, 2])) == [(5,)]
    assert paths(propose(documents, [8, 1, 2])) == [(6,), (5,)]
    assert paths(propose(documents, [9, 1, 2], max_match=2)) == [(6,), (5,)]


def test_a_match_shorter_than_two_tokens_is_none() -> None:
    documents = [[1, 2, 3]]
    assert propose(documents, [9, 2]) == NO_DRAFT
    assert paths(propose(documents, [9, 2], min_match=1)) == [(3,)]
    assert propose(documents, [2]) == NO_DRAFT


def test_a_match_at_the_end_of_a_document_gives_way_to_a_shorter_one_that_goes_on() -> None:
    assert paths(propose([[7, 8, 9], [8, 9, 1]], [7, 8, 9])) == [(1,)]
    assert propose([[7, 8, 9], [1, 1, 1]], [7, 8, 9]) == NO_DRAFT


def test_of_too_many_matches_an_even_sample_keeps_the_ratios() -> None:
    """The first ones in sorted order would all go on with the smallest ids."""
    documents = [[1, 2, 3]] * 300 + [[1, 2, 4]] * 600
    assert paths(propose(documents, [1, 2], matches=30)) == [(4,), (3,)]
    draft = propose(documents, [1, 2], matches=30)
    assert draft.scores[0] == pytest.approx(2 / 3, abs=0.05)


def test_a_branch_is_no_deeper_than_asked_and_a_budget_is_kept() -> None:
    documents = [list(range(40))]
    assert len(propose(documents, [0, 1])) == 10
    assert len(propose(documents, [0, 1], branch=3)) == 3
    assert len(propose(documents, [0, 1], 4)) == 4
    assert propose(documents, [0, 1], 0) == NO_DRAFT
    assert len(propose([list(np.random.default_rng(0).integers(0, 3, 5000))], [0, 1])) == 64
    assert len(propose(documents, [0, 1], 10**9)) == 10


def test_it_branches_where_copying_from_a_reference_goes_one_way() -> None:
    """What sets it apart from prompt lookup over the same text: all continuations at once, by count."""
    text = [1, 2, 3, 0, 1, 2, 4, 0, 1, 2, 4, 0]
    request = Request(id="r", prompt=(0,), params=SamplingParams(), key=NoiseKey(0), references=(tuple(text),))
    lookup = PromptLookup(Resources(VOCAB, no_runner), PromptLookupOptions()).propose(
        [Sight([1, 2], request=request)], [2]
    )[0]
    draft = propose([text], [1, 2], 2, branch=1)
    assert trees.is_chain(lookup.tree)
    assert paths(draft) == [(4,), (3,)]


def test_sequences_do_not_touch_each_other() -> None:
    drafter = Retrieval(resources_of([[1, 2, 3], [4, 5, 6]]), Options(file="a store"))
    drafts = drafter.propose([Sight([1, 2]), Sight([4, 5], 1), Sight([1, 2], 2)], [4, 4, 0])
    assert [paths(draft) for draft in drafts] == [[(3,)], [(6,)], []]
    drafter.release(0)
    drafter.release(77)
    assert drafter.propose([Sight([1, 2])], [4]) == drafts[:1]


# ----------------------------------------------------------------------------------------------------- in an engine


@pytest.fixture(scope="module")
def stage() -> Stage:
    return toy_stage("toy")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_store_that_holds_the_answer_gives_a_whole_branch_and_one_more_each_step(
    stage: Stage, temperature: float
) -> None:
    prompt = tuple(np.random.default_rng(3).integers(0, stage.vocab_size, 20).tolist())
    ask = StageRequest(prompt, SamplingParams(temperature=temperature, max_tokens=1 + 11 * 6), seed=4)
    (plain,) = decode(stage.open_runner(4096), [(ask, PLAIN.strategy(stage, 0))])
    resources = resources_of([[*prompt, *plain.tokens]], stage.vocab_size)
    subject = Subject("retrieval", lambda _: Retrieval(resources, Options(file="a store", max_match=32)))
    (sample,) = decode(stage.open_runner(4096), [(ask, subject.strategy(stage, 64))])
    assert sample.tokens == plain.tokens
    assert sample.steps[:6] == [11] * 6
    assert sample.metrics.tokens_per_step > 9


# ----------------------------------------------------------------------------------------------------- what is refused


def test_a_store_must_be_named() -> None:
    with pytest.raises(UsageError, match=r"file=PATH.*parlay datastore build"):
        build(parse("datastore"), resources_of([[1, 2]]))


@pytest.mark.parametrize(
    "text", ["branch=0", "max_match=0", "min_match=0", "matches=0", "matches=1000000", "branch=x", "k=-1"]
)
def test_settings_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=text.partition("=")[0]):
        parse(f"datastore:file=x,{text}")
    with pytest.raises(UsageError, match="min_match 5 is more than max_match 4"):
        propose([[1, 2]], [1], max_match=4, min_match=5)


def test_a_file_that_is_none_of_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("no datastore")
    with pytest.raises(BadDatastore, match="is not a datastore"):
        build(parse(f"datastore:file={tmp_path / 'store'}"), Resources(VOCAB, no_runner))


def test_a_store_for_another_vocabulary_or_tokenizer_is_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(resolve("parlay-mini"))
    ids = [np.array(tokenizer.encode("the quick brown fox"))]
    spec = parse(f"datastore:file={tmp_path / 'store'}")
    Datastore.build(ids, 4096, tokenizer="mini", fingerprint=fingerprint(tokenizer)).write(tmp_path / "store")
    assert build(spec, Resources(4096, no_runner, tokenizer=tokenizer)) is not None
    with pytest.raises(UsageError, match="vocabulary of 4096 tokens and the target one of 50"):
        build(spec, Resources(50, no_runner))
    Datastore.build(ids, 4096, tokenizer="mega", fingerprint="other").write(tmp_path / "store")
    with pytest.raises(UsageError, match=r"another tokenizer \(mega\)"):
        build(spec, Resources(4096, no_runner, tokenizer=tokenizer))
