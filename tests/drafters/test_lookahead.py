"""Lookahead decoding: the window step by step, the pool against a naive simulation, and that windows cost no token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from parlay.drafters.copying.prompt_lookup import PromptLookup, PromptLookupOptions
from parlay.drafters.fixed_point import lookahead, ngram_pool
from parlay.drafters.fixed_point.jacobi import Jacobi
from parlay.drafters.fixed_point.lookahead import GuessWindow, Lookahead
from parlay.drafters.fixed_point.ngram_pool import NgramPool
from parlay.drafters.options import JacobiOptions, LookaheadOptions
from parlay.drafters.resources import Resources
from parlay.drafters.step_budget import STEP_TOKENS
from parlay.engine import Limits
from parlay.options import UsageError
from parlay.router.policies import Fixed, adaptive
from parlay.sampling.rules import SharedNoise
from parlay.strategies.spelling import parse
from parlay.testing import reference, toy_drafters
from parlay.testing.conformance.stage import StageRequest, StageSample, Steady, decode
from parlay.testing.toys import RandomLogits, ToyRunner
from parlay.types import (
    Draft,
    Drafter,
    NoiseKey,
    Observation,
    Policy,
    Request,
    SamplingParams,
    SequenceView,
    Strategy,
    Verdict,
    trees,
)
from tests.drafters.sight import no_runner

VOCAB = 12
LOGITS = RandomLogits(VOCAB, seed=1)
ANSWER = toy_drafters.answer_by(LOGITS)
GREEDY = SamplingParams(temperature=0, max_tokens=120)
SAMPLED = SamplingParams(temperature=0.6, max_tokens=120)
BOTH = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
PROMPT = (5, 6, 7, 8, 5, 6, 9)


RESOURCES = Resources(vocab_size=VOCAB, open_runner=no_runner)
REQUEST = Request(id="r", prompt=PROMPT, params=SamplingParams(), key=NoiseKey(0))


@dataclass
class Sight:
    tokens: list[int] = field(default_factory=lambda: list(PROMPT))
    sequence: int = 0
    request: Request = REQUEST
    prompt_length: int = len(PROMPT)


def make(window: int = 4, ngram: int = 4, guesses: int = 3, copy: bool = True) -> Lookahead:
    return Lookahead(RESOURCES, LookaheadOptions(window=window, ngram=ngram, guesses=guesses, copy=copy))


def propose(drafter: Drafter, tokens: Sequence[int], budget: int = 100) -> Draft:
    return drafter.propose([Sight(list(tokens), prompt_length=min(len(tokens), len(PROMPT)))], [budget])[0]


def texts(draft: Draft) -> set[tuple[int, ...]]:
    """The guesses that a draft holds, root to leaf."""
    tree = trees.without_probes(draft).tree
    return {tuple(tree.tokens[node] for node in path) for path in trees.leaf_paths(tree)}


def run(
    drafter: Drafter,
    params: SamplingParams,
    policy: Policy | None = None,
    *,
    tree: Literal["tree", "chain", "none"] = "tree",
    draft_rows: int = 256,
) -> StageSample:
    strategy = Strategy("lookahead", (drafter,), SharedNoise(), policy or Fixed(100))
    jobs = [(StageRequest(PROMPT, params, seed=3), strategy)]
    (sample,) = decode(ToyRunner(LOGITS, VOCAB, tree=tree), jobs, Limits(max_draft_rows=draft_rows))
    return sample


def plain(params: SamplingParams) -> list[int]:
    return reference.decode(LOGITS, StageRequest(PROMPT, params, seed=3).request("expected")).output


class Watched:
    """Passes everything on, and keeps what it saw."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.needs = inner.needs
        self.seen: list[tuple[list[int], Observation]] = []

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        return self.inner.propose(views, budgets)

    def observe(self, observations: Sequence[Observation]) -> None:
        (one,) = observations
        self.seen.append((list(one.view.tokens), one))
        self.inner.observe(observations)

    def release(self, sequence: int) -> None:
        self.inner.release(sequence)


# ------------------------------------------------------------------------------------------------------- the window


def say(token: int) -> int:
    """What the target of the worked example says after a token."""
    return (3 * token + 1) % 10


def test_a_window_step_by_hand() -> None:
    """W=3, N=3, target 3t+1 mod 10, root 2: a row is added, then trigrams come out, one per column."""
    window = GuessWindow([4, 5, 6], ngram=3)
    assert window.nodes(0) == ([4, 5, 6], [-1, 0, 1])
    assert window.advance(2, [say(token) for token in (2, 4, 5, 6)]) == []
    assert window.rows == [[5, 6], [3, 6, 9]]
    assert window.nodes(10) == ([5, 6, 3, 6, 9], [-1, 10, -1, 10, 11])
    assert window.advance(7, [say(token) for token in (3, 6, 9)]) == [(7, 3, 0), (5, 6, 9), (6, 9, 8)]
    assert window.rows == [[6, 9], [0, 9, 8]]


def test_the_smallest_window_is_a_bigram_at_the_root() -> None:
    window = GuessWindow([], ngram=2)
    assert window.nodes(0) == ([], [])
    assert window.advance(2, [7]) == [(2, 7)]
    assert window.rows == [[]]


@pytest.mark.parametrize(("columns", "ngram"), [(3, 4), (1, 5), (6, 2), (2, 3)])
def test_a_node_of_the_window_sees_row_0_up_to_its_column_and_its_column_above_it(columns: int, ngram: int) -> None:
    """The mask of the paper, and its position l + i, come out of the tree; the guesses are seen by none of it."""
    window = GuessWindow(list(range(columns + ngram - 3)), ngram)
    for _ in range(ngram - 2):
        window.advance(0, [0] * (len(window.rows[-1]) + (len(window.rows) == 1)))
    guesses = 5
    tokens, parents = window.nodes(guesses)
    tree = trees.merge([trees.chain(range(guesses), "g")]).tree
    whole = replace(tree, tokens=(*tree.tokens, *tokens), parents=(*tree.parents, *parents))
    places = [(0, i) for i in range(1, columns)] + [(row, i) for row in range(1, ngram - 1) for i in range(columns)]
    assert len(tokens) == len(places) == (columns - 1) + columns * (ngram - 2)
    for row, (level, column) in enumerate(places):
        seen = trees.visibility(whole)[guesses + row]
        above = {(0, i) for i in range(1, column + 1)} | {(j, column) for j in range(1, level + 1)}
        assert {places[node - guesses] for node, sees in enumerate(seen) if sees} == above
        assert trees.depths(whole)[guesses + row] == level + column


# --------------------------------------------------------------------------------------------------------- the pool


def naive_pool(seen: list[tuple[int, ...]], first: int, most: int) -> list[tuple[int, ...]]:
    """The latest different n-grams that begin with ``first``, from all that ever came, in their order."""
    latest: list[tuple[int, ...]] = []
    for ngram in reversed(seen):
        if ngram[0] == first and ngram[1:] not in latest:
            latest.append(ngram[1:])
    return latest[:most]


def test_a_pool_holds_the_latest_ngrams_of_each_first_token() -> None:
    chance = torch.Generator().manual_seed(0)
    came = [tuple(torch.randint(0, 4, (3,), generator=chance).tolist()) for _ in range(300)]
    pool = NgramPool(5)
    for number, (first, *tail) in enumerate(came):
        pool.add(first, tuple(tail))
        for key in range(4):
            assert pool.after(key) == naive_pool(came[: number + 1], key, 5)
        assert len(pool) == sum(len(pool.after(key)) for key in range(4))


def test_a_pool_is_bounded_and_gives_up_what_came_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_pool, "CAPACITY", 4)
    pool = NgramPool(2)
    for first, tail in [(1, 1), (2, 1), (2, 2), (3, 1), (1, 2), (4, 1)]:
        pool.add(first, (tail,))
    assert len(pool) == 4
    assert pool.after(2) == []
    assert pool.after(1) == [(2,), (1,)]


@BOTH
@pytest.mark.parametrize(("columns", "ngram", "copy"), [(3, 4, False), (4, 3, True), (5, 2, False), (1, 3, True)])
def test_drafts_equal_those_of_a_naive_simulation(params: SamplingParams, columns: int, ngram: int, copy: bool) -> None:
    """At every step: the same window, and the guesses of a pool that is searched from the beginning."""
    most = 3
    watched = Watched(make(columns, ngram, most, copy))
    assert run(watched, params).tokens == plain(params)
    first = watched.seen[0][1].draft
    naive = Naive(columns, ngram, first.tree.tokens[len(first) - first.probes :])
    text = list(PROMPT)
    for after, one in watched.seen:
        if len(text) > len(PROMPT) + 100:
            break  # where the end of the request is near, budgets are less than the guesses
        wanted = naive_pool(naive.came(text, copy), text[-1], most)
        tree = trees.without_probes(one.draft).tree
        assert tree == trees.merge([trees.chain(tail, "") for tail in wanted]).tree
        probes = [trees.path_to(one.draft.tree, node) for node in range(len(tree), len(one.draft))]
        assert [tuple(one.draft.tree.tokens[node] for node in path) for path in probes] == naive.paths()
        naive.step(Sight(text, request=one.view.request), text)
        text = after


class Naive:
    """The window as a table of level and column, where each answer is asked for by its whole path."""

    def __init__(self, columns: int, ngram: int, row: Sequence[int]) -> None:
        self.ngram = ngram
        self.cells = {(0, i + 1): token for i, token in enumerate(row)}
        self.columns = columns + ngram - 2
        self.levels = 1
        self._events: list[tuple[int, list[tuple[int, ...]]]] = []

    def path(self, level: int, column: int) -> tuple[int, ...]:
        row0 = [self.cells[0, i] for i in range(1, column + 1)]
        return (*row0, *(self.cells[j, column] for j in range(1, level + 1)))

    def paths(self) -> list[tuple[int, ...]]:
        return [
            self.path(level, column)
            for level in range(self.levels)
            for column in range(self.columns)
            if (level, column) != (0, 0)
        ]

    def step(self, view: Sight, text: list[int]) -> None:
        answers = {i: ANSWER(view, self.path(self.levels - 1, i)) for i in range(self.columns)}
        cells = dict(self.cells) | {(self.levels, i): token for i, token in answers.items()}
        if self.levels < self.ngram - 1:  # one level more, all columns one to the left
            self.levels += 1
            self.columns -= 1
            self.cells = {(j, i - 1): token for (j, i), token in cells.items() if (j, i) != (0, 1) and i > 0}
            self._events.append((len(text), []))
            return
        cells[0, 0] = text[-1]
        new = [tuple(cells[j, i] for j in range(self.ngram)) for i in range(self.columns)]
        self._events.append((len(text), new))
        self.cells = {(j - 1, i): token for (j, i), token in cells.items() if j > 0 and (j, i) != (1, 0)}

    def came(self, text: list[int], copy: bool) -> list[tuple[int, ...]]:
        """All n-grams in their order. Those of the text join once committed: the prompt's first, then each step's."""
        came: list[tuple[int, ...]] = []
        known = 0
        for length, new in [*self._events, (len(text), [])]:
            ends = range(max(known, self.ngram - 1), length if copy else 0)
            came += [tuple(text[end - self.ngram + 1 : end + 1]) for end in ends]
            came += new
            known = length
        return came


def test_a_guess_is_verified_when_its_first_token_comes() -> None:
    """The paper's point: an n-gram is worth keeping wherever it was found. Here the text has three after a 5."""
    draft = propose(make(window=0, ngram=3), [5, 1, 2, 5, 3, 4, 5, 1, 9, 5])
    assert texts(draft) == {(1, 9), (3, 4), (1, 2)}
    assert draft.tree.tokens[0] == 1  # shared by two of them, the latest of which comes first
    assert len(draft) == 5


def test_a_whole_ngram_and_the_bonus_are_n_tokens_a_step() -> None:
    """A text that the pool knows by heart: N - 1 guesses are accepted, and the target says one more."""

    def cycle(ids: Sequence[int]) -> Tensor:
        return torch.nn.functional.one_hot(torch.tensor((ids[-1] + 5) % VOCAB), VOCAB).float()

    prompt = tuple(5 * place % VOCAB for place in range(2 * VOCAB))
    strategy = Strategy("lookahead", (make(window=3, ngram=5),), SharedNoise(), Fixed(100))
    ask = StageRequest(prompt, replace(GREEDY, max_tokens=40))
    (sample,) = decode(ToyRunner(cycle, VOCAB), [(ask, strategy)], Limits())
    assert sample.metrics.tokens_per_step == 5


# ---------------------------------------------------------------------------------------------------------- isolation


@BOTH
def test_no_probe_is_ever_accepted_and_without_probes_the_text_is_the_same(params: SamplingParams) -> None:
    watched = Watched(make())
    sample = run(watched, params)
    assert sample.tokens == plain(params)
    assert sample.metrics.draft_tokens == sum(len(one.draft) - one.draft.probes for _, one in watched.seen)
    for _, one in watched.seen:
        assert one.draft.probes > 0
        assert all(node < len(one.draft) - one.draft.probes for node in one.verdict.path)
    assert run(WithoutProbes(make()), params).tokens == sample.tokens


class WithoutProbes(Watched):
    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        return [trees.without_probes(draft) for draft in self.inner.propose(views, budgets)]


@BOTH
def test_the_window_finds_what_the_text_does_not_hold(params: SamplingParams) -> None:
    """Without copying, all that is accepted comes of the window."""
    assert run(make(copy=False), params).metrics.accepted_tokens > 0
    assert run(WithoutProbes(make(copy=False)), params).metrics.draft_tokens == 0


@BOTH
@pytest.mark.parametrize(
    ("tree", "draft_rows"), [("chain", 256), ("none", 256), ("tree", 4)], ids=["chain", "none", "few rows"]
)
def test_where_the_window_cannot_run_guesses_are_left_and_the_text_is_the_same(
    params: SamplingParams, tree: Literal["tree", "chain", "none"], draft_rows: int
) -> None:
    watched = Watched(make())
    sample = run(watched, params, tree=tree, draft_rows=draft_rows)
    assert sample.tokens == plain(params)
    assert all(one.draft.probes == 0 or trees.is_chain(one.draft.tree) for _, one in watched.seen)
    assert (sample.metrics.accepted_tokens > 0) == (tree != "none")
    assert sample.metrics.drafter_faults == 0


@BOTH
def test_a_window_that_comes_and_goes_changes_no_text(params: SamplingParams) -> None:
    """The adaptive policy withholds drafts; an unseen window waits as it is."""
    sample = run(make(), params, adaptive(Steady(), 16))
    assert sample.tokens == plain(params)
    assert sample.metrics.drafter_faults == 0


def test_a_window_that_was_not_seen_whole_waits_as_it_is() -> None:
    drafter, sight = make(window=2, ngram=3, copy=False), Sight()
    before = drafter.propose([sight], [9])[0]
    part = trees.subtree(before, range(len(before) - 1))
    rows = tuple((token,) for token in range(1, len(part) + 2))
    sight.tokens.append(1)
    drafter.observe([Observation(sight, part, Verdict((), (1,)), top_k=rows)])
    assert drafter.propose([sight], [9])[0] == before


# ------------------------------------------------------------------------------------------------------ degenerate


def test_without_a_window_only_the_text_is_guessed_from() -> None:
    drafter = make(window=0)
    assert drafter.needs.top_k == 0
    assert texts(propose(drafter, [1, 2, 3, 4, 5, 1])) == {(2, 3, 4)}
    assert len(propose(make(window=0, copy=False), [1, 2, 3, 4, 5, 1])) == 0


@BOTH
def test_without_guesses_it_is_plain_decoding(params: SamplingParams) -> None:
    """A window whose n-grams nobody will verify is not computed."""
    sample = run(make(guesses=0), params)
    assert sample.tokens == plain(params)
    assert sample.metrics.steps == len(sample.tokens)
    assert make(guesses=0).needs.top_k == 0
    assert len(propose(make(guesses=0), PROMPT)) == 0


@pytest.mark.parametrize("tokens", [[1], [1, 1], [3, 1, 2]])
def test_a_text_shorter_than_an_ngram_has_a_window_and_no_guess(tokens: list[int]) -> None:
    draft = propose(make(), tokens)
    assert len(draft) == draft.probes == 4 + 4 - 3


# ------------------------------------------------------------------------------------------------------- housekeeping


def test_the_budget_bounds_the_guesses_and_not_the_window() -> None:
    tokens = [5, 1, 2, 3, 5, 4, 6, 7, 5]
    whole = propose(make(), tokens)
    for budget in range(1, 9):
        draft = propose(make(), tokens, budget)
        assert draft.probes == whole.probes
        assert len(draft) - draft.probes == min(budget, 6)
    assert len(propose(make(), tokens, 0)) == 0


def test_guesses_score_by_their_rank_and_probes_not_at_all() -> None:
    draft = propose(make(ngram=3), [5, 1, 2, 5, 3, 4, 5])
    assert draft.tree.tokens[:4] == (3, 4, 1, 2)
    assert draft.scores[0] > draft.scores[2]
    assert all(0 < score < 1 for score in draft.scores[:4])
    assert set(draft.scores[4:]) == {0.0}


def test_tokens_taken_back_take_with_them_what_was_learnt() -> None:
    drafter = make()
    propose(drafter, [1, 2, 3, 4, 5, 1])
    draft = propose(drafter, [1, 9, 1])
    assert texts(draft) == set()
    assert draft == propose(make(), [1, 9, 1])


def test_the_first_window_is_drawn_from_the_prompt_by_the_requests_key() -> None:
    drafts = [
        make().propose([Sight(request=replace(REQUEST, key=NoiseKey(seed)))], [9])[0].tree.tokens for seed in (0, 0, 1)
    ]
    assert drafts[0] == drafts[1] != drafts[2]
    assert set(drafts[0][-5:]) <= set(PROMPT)


def test_a_sequence_that_is_over_is_forgotten() -> None:
    drafter = make()
    propose(drafter, [1, 2, 3, 4, 5, 1])
    drafter.release(0)
    drafter.release(0)
    assert texts(propose(drafter, [9, 1])) == set()


def test_it_keeps_several_ngrams_of_one_token_where_its_relatives_follow_one_text() -> None:
    """The longest match and the last iterate each give one continuation; the pool all that followed the token."""
    tokens = [5, 1, 2, 7, 8, 5, 3, 4, 7, 5]
    assert texts(propose(make(window=0, ngram=3), tokens)) == {(1, 2), (3, 4)}
    assert propose(PromptLookup(RESOURCES, PromptLookupOptions()), tokens, 2).tree.tokens == (3, 4)
    assert propose(Jacobi(RESOURCES, JacobiOptions()), tokens, 2).tree.tokens == (0, 0)


@pytest.mark.parametrize("wrong", ["window=-1", "ngram=1", "guesses=-1", "guesses=2000", "copy=perhaps", "ngrams=3"])
def test_a_parameter_out_of_range_is_refused_in_one_line(wrong: str) -> None:
    with pytest.raises(UsageError, match=wrong.partition("=")[0]) as caught:
        parse(f"{lookahead.SOURCE}:{wrong}")
    assert "\n" not in str(caught.value)


def test_a_long_text_is_taken_in_a_part_a_step() -> None:
    drafter = Lookahead(RESOURCES, LookaheadOptions(window=0, ngram=2))
    view = Sight([place * place % 11 for place in range(3 * STEP_TOKENS)])
    for step in range(1, 4):
        drafter.propose([view], [4])
        assert len(drafter._states[0].history.tokens) == step * STEP_TOKENS
    assert drafter.propose([view], [4])[0].tree.tokens[0] in view.tokens
