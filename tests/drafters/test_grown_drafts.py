"""Drafts that the compiled decoder writes in one call are those of the loop over forwards; the short list of tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch

from parlay.drafters.draft_models.draft_model import DraftModel
from parlay.drafters.draft_models.grown import GrownDrafts
from parlay.drafters.resources import Resources
from parlay.models.compiled import short_head
from parlay.models.config import DecoderConfig
from parlay.models.native import NativeRunner
from parlay.strategies.building import build
from parlay.strategies.spelling import parse
from parlay.types import SamplingParams
from tests.drafters.sight import GREEDY, Sight, propose
from tests.models.test_bits import UNEVEN, random_weights

VOCAB = 97
CONFIG = DecoderConfig(
    architecture="LlamaForCausalLM", vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=16, rms_norm_eps=1e-6, max_context=512, tie_embeddings=True,
)  # fmt: skip
SAMPLINGS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.3, top_p=0.7),
    SamplingParams(temperature=0.7, top_k=5, min_p=0.05),
]


DIFFERING = replace(CONFIG, num_layers=4, layers=UNEVEN, per_layer_size=8)


def tiny(dtype: torch.dtype = torch.float32, config: DecoderConfig = CONFIG) -> NativeRunner:
    weights = {name: tensor.to(dtype) for name, tensor in random_weights(config).items()}
    weights["model.embed_tokens.weight"] *= 0.5
    weights.pop("lm_head.weight", None)
    runner = NativeRunner(config, weights, dtype=dtype, device=torch.device("cpu"), max_tokens_cached=4096)
    if not runner.grows:
        pytest.skip("no compiled decoder")
    return runner


def drafter_on(runner: NativeRunner, settings: str) -> DraftModel:
    resources = Resources(vocab_size=VOCAB, open_runner=lambda name: runner, default_draft="tiny")
    return cast(DraftModel, build(parse(f"draft-model:{settings}"), resources))


def by_the_loop(settings: str, config: DecoderConfig = CONFIG) -> DraftModel:
    drafter = drafter_on(tiny(config=config), settings)
    drafter._writer = cast(GrownDrafts, drafter._writer)._slow
    return drafter


@pytest.mark.parametrize("params", SAMPLINGS, ids=["greedy", "sampled", "top-p", "top-k"])
def test_a_chain_has_the_tokens_of_the_loop_over_forwards(params: SamplingParams) -> None:
    """Step after step, whatever of a draft was committed; several sequences at once draft as each alone."""
    one, loop = drafter_on(tiny(), "min_p=0,tokens=0"), by_the_loop("min_p=0")
    request = replace(GREEDY, params=params)
    views = [Sight(number, [number, 5, 9], request) for number in range(3)]
    for accepted in (5, 0, 2, 5, 1):
        drafts = one.propose(views, [5, 3, 5])
        assert [draft.tree for draft in drafts] == [draft.tree for draft in loop.propose(views, [5, 3, 5])]
        for view, draft in zip(views, drafts, strict=True):
            view.tokens += [*draft.tree.tokens[:accepted], 11]


ENDS = frozenset(range(0, VOCAB, 5))


@pytest.mark.parametrize("params", SAMPLINGS, ids=["greedy", "sampled", "top-p", "top-k"])
def test_nothing_is_drafted_below_a_token_that_ends_the_text(params: SamplingParams) -> None:
    """By chains in one call, by the loop over forwards, and by trees, whose other branches go on."""
    one, loop = drafter_on(tiny(), "min_p=0,tokens=0"), by_the_loop("min_p=0")
    tree = drafter_on(tiny(), "min_p=0,tokens=0,shape=tree,width=3")
    views = [Sight(number, [number, 5, 9], replace(GREEDY, params=params, stop_ids=ENDS)) for number in range(4)]
    ended = 0
    for accepted in (8, 1, 0, 3):
        drafts = one.propose(views, [8] * 4)
        assert [draft.tree for draft in drafts] == [draft.tree for draft in loop.propose(views, [8] * 4)]
        for draft in (*drafts, *tree.propose(views, [8] * 4)):
            assert not ENDS & {draft.tree.tokens[parent] for parent in draft.tree.parents if parent >= 0}
            ended += not ENDS.isdisjoint(draft.tree.tokens)
        for view, draft in zip(views, drafts, strict=True):
            view.tokens += [*[token for token in draft.tree.tokens[:accepted] if token not in ENDS], 11]
    assert ended


def test_a_model_whose_layers_differ_drafts_as_the_loop_over_forwards() -> None:
    """Its layers see others' keys, and read numbers of each token that is drafted; what stays changes nothing."""
    one, loop = drafter_on(tiny(config=DIFFERING), "min_p=0,tokens=0"), by_the_loop("min_p=0", DIFFERING)
    tree, view = "min_p=0,tokens=0,shape=tree", Sight(0, [7, 5, 9])
    grown = drafter_on(tiny(config=DIFFERING), tree)
    for accepted in (5, 0, 2):
        chain = propose(one, view, 6)
        assert chain.tree == propose(loop, view, 6).tree
        fresh = drafter_on(tiny(config=DIFFERING), tree)
        assert propose(grown, view, 6) == propose(fresh, replace(view, tokens=list(view.tokens)), 6)
        view.tokens += [*chain.tree.tokens[:accepted], 11]


def test_scores_are_the_models_probabilities_of_greedy_requests() -> None:
    view = Sight(0, [1, 2, 3])
    draft, expected = propose(drafter_on(tiny(), "min_p=0,tokens=0"), view, 5), propose(by_the_loop("min_p=0"), view, 5)
    assert draft.scores == pytest.approx(expected.scores, rel=1e-4)


@pytest.mark.parametrize("settings", ["min_p=0,shape=tree", "min_p=0.01,shape=tree,width=4", "min_p=0,shape=chain"])
def test_what_stays_cached_changes_no_later_draft(settings: str) -> None:
    """After full acceptance, partial, none, a rewind, another text under the same name."""
    drafter, view = drafter_on(tiny(), settings), Sight(0, [1, 2, 3])
    for commit in ("all", "none", "some", "all", "rewind", "replace", "some"):
        draft = propose(drafter, view, 6)
        assert draft == propose(drafter_on(tiny(), settings), replace(view, tokens=list(view.tokens)), 6)
        path = list(draft.tree.tokens[:1] if "tree" in settings else draft.tree.tokens)
        if commit == "rewind":
            del view.tokens[3:]
        elif commit == "replace":
            view.tokens = [9, 8, 7]
        else:
            view.tokens += {"all": [*path, 11], "some": [*path[:1], 11], "none": [11]}[commit]


def test_accepted_tokens_are_not_fed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, view, fed = tiny(), Sight(0, [1, 2, 3]), []
    grow = runner.grow
    monkeypatch.setattr(NativeRunner, "grow", lambda self, texts, *rest: fed.append(texts) or grow(texts, *rest))
    drafter = drafter_on(runner, "min_p=0,shape=tree,width=2")
    draft = propose(drafter, view, 6)
    best = max(
        (node for node in range(len(draft.tree)) if draft.tree.parents[node] == -1), key=lambda n: draft.scores[n]
    )
    view.tokens += [draft.tree.tokens[best], 11]
    propose(drafter, view, 6)
    assert fed[1][0].pending == (11,)


def test_a_request_whose_logits_are_edited_goes_another_way() -> None:
    request = replace(GREEDY, params=SamplingParams(temperature=0, logit_bias={42: 100.0}))
    draft = propose(drafter_on(tiny(), "min_p=0"), Sight(0, [1, 2, 3], request), 4)
    assert draft.tree.tokens == (42,) * 4


def test_a_draft_ends_where_its_path_is_unlikely() -> None:
    view = Sight(0, [1, 2, 3])
    whole = propose(drafter_on(tiny(), "min_p=0,tokens=0"), view, 6)
    chances = torch.tensor(whole.scores).cumprod(0)
    least = float(chances[2]) * 0.99
    assert len(propose(drafter_on(tiny(), f"min_p={least},tokens=0"), view, 6)) == int((chances >= least).sum())


def test_a_short_list_has_frequent_tokens_and_the_newest_of_the_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_head, "_NEWEST", 32)
    drafter, prompt = drafter_on(tiny(), "min_p=0,tokens=32"), [80, 81, 90]
    draft = propose(drafter, Sight(0, prompt), 8)
    assert set(draft.tree.tokens) <= {*range(64), *prompt}
    every = drafter_on(tiny(), "min_p=0,tokens=0")
    common = propose(every, Sight(0, prompt), 8).tree.tokens
    agreed = next((place for place, token in enumerate(common) if token >= 64 and token not in prompt), 8)
    assert draft.tree.tokens[:agreed] == common[:agreed]


def test_a_short_list_has_no_tokens_of_another_tenants_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else their speed would tell one tenant what the other's texts contain."""
    monkeypatch.setattr(short_head, "_NEWEST", 32)
    drafter, prompt = drafter_on(tiny(), "min_p=0,tokens=32,shape=tree,width=16"), [80, 81, 90]
    propose(drafter, Sight(0, [*range(64, 96)]), 48)
    draft = propose(drafter, Sight(1, prompt, replace(GREEDY, salt="alice")), 48)
    assert draft.tree.tokens
    assert set(draft.tree.tokens) <= {*range(32), *prompt}


def test_old_tokens_leave_a_short_list_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_head, "_NEWEST", 32)
    head = tiny()._forward.short_head(32)  # type: ignore[union-attr]
    assert head.newest is not None
    head.newest.add(range(64, 96), "")
    assert set(head.tokens_D.tolist()) == {*range(32), *range(64, 96)}
    head.newest.add([50, 70], "")
    assert set(head.tokens_D.tolist()) == {*range(32), *range(65, 96), 50}
