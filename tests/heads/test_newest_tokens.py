"""A head with the target's LM head also drafts the newest tokens of the texts, which its draft vocabulary lacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parlay import models
from parlay.drafters.heads.eagle3 import Eagle3
from parlay.drafters.options import EAGLE3
from parlay.heads import artefact
from parlay.heads.artefact import HeadArtefact, Origin
from parlay.heads.base import NEWEST, draft_ids, with_newest
from parlay.heads.native import eagle3_decoder
from parlay.heads.opening import OpenHead, opened_artefact
from parlay.llm import LLM
from parlay.llm.input_processor import InputProcessor
from parlay.models.forward import Growth, HeadRows, TreeRequest
from parlay.models.gguf.blocks import encoded
from parlay.models.native import NativeRunner
from parlay.models.weights.formats import Format
from parlay.models.weights.fused import Operand
from parlay.models.weights.stored import StoredTensor
from parlay.testing.random_heads import random_heads
from parlay.text.prompts import TokensPrompt
from parlay.train.recipes.target import Target
from parlay.types import Draft, PickedRows, SamplingParams, Segment, SequenceView
from tests.heads.conftest import LOAD

_MODEL = "parlay-mini"
_LATE = range(2 * NEWEST + 1, 4096, 2)  # neither drafted by a random head nor in a slot at first


@pytest.fixture(scope="module")
def whole() -> HeadArtefact:
    """A head that can draft half of the tokens, and has an LM head of its own."""
    opened = random_heads(models.load(_MODEL, LOAD).spec)(EAGLE3, "")
    assert opened is not None
    return opened.artefact


@pytest.fixture(scope="module")
def shared(whole: HeadArtefact) -> HeadArtefact:
    return whole.without("lm_head.weight")


def runner_of(opened: OpenHead, ids_D: Tensor, name: str) -> NativeRunner:
    head = opened.artefact
    runner = opened.runner(name, partial(eagle3_decoder, head.layer, head.operands, opened.embedding, ids_D))
    if not runner.grows:
        pytest.skip(runner.spec.kernels)
    return runner


def grown(
    runner: NativeRunner, opened: OpenHead, ids_D: Tensor, unread: Sequence[int], salt: str = ""
) -> set[tuple[int, float]]:
    """The 64 likeliest tokens that the head drafts next, with their chances."""
    text = (1, 2, 3)
    runner.open(0, text)
    assert runner.reserve(0, 100)
    first = opened.fuse.linear
    torch.manual_seed(3)
    features = PickedRows(torch.randn(len(text), first.inputs), range(len(text)))
    rows = HeadRows(ids_D, first, [features])
    growth, request = Growth(1, 64, 0.0, rows), TreeRequest(64, unread=unread, salt=salt)
    [tree] = runner.grow([Segment(0, text, logits_from=len(text) - 1)], growth, [request])
    runner.release(0)
    return set(zip(tree.tokens, tree.chances, strict=True))


def embeddings() -> list[Operand]:
    """Some embedding as plain numbers, and in blocks."""
    torch.manual_seed(7)
    plain = torch.randn(4096, 256)
    return [plain, StoredTensor(Format.Q4_1, tuple(plain.shape), encoded(Format.Q4_1, plain))]


@pytest.mark.parametrize("embedding", embeddings(), ids=["plain", "blocks"])
def test_slots_draft_as_outputs_that_have_always_been_there(shared: HeadArtefact, embedding: Operand) -> None:
    """Also after they were used again for newer tokens: chances are the same, bit for bit."""
    opened = opened_artefact(shared, embedding)
    assert opened.rows_of_lm_head is not None
    ids_D, slot = with_newest(draft_ids(shared.tensors["d2t"]), 4096)
    runner = runner_of(opened, ids_D, "with slots")
    tokens_D = runner.list_newest(ids_D, slot, opened.rows_of_lm_head)
    assert len(tokens_D) - slot == NEWEST
    for unread in ([], [_LATE[0], _LATE[2], 2], _LATE, [_LATE[7], 5, 5]):
        found = grown(runner, opened, tokens_D, unread)
        assert {*unread[-NEWEST:]} <= {*tokens_D.tolist()}
        assert len({*tokens_D.tolist()}) == len(tokens_D)
        fixed_D = tokens_D.clone()
        assert found == grown(runner_of(opened, fixed_D, f"after {unread}"), opened, fixed_D, ())


def test_a_head_with_an_lm_head_of_its_own_has_no_slots(whole: HeadArtefact) -> None:
    assert opened_artefact(whole, torch.zeros(4096, 256)).rows_of_lm_head is None


def test_tokens_of_a_tenant_are_drafted_for_that_tenant_alone(shared: HeadArtefact) -> None:
    """Two tenants who list the same token have a slot each, and no text's draft tells what another tenant's had."""
    opened = opened_artefact(shared, embeddings()[0])
    assert opened.rows_of_lm_head is not None
    ids_D, slot = with_newest(draft_ids(shared.tensors["d2t"]), 4096)
    runner = runner_of(opened, ids_D, "of two tenants")
    tokens_D = runner.list_newest(ids_D, slot, opened.rows_of_lm_head)
    everybodys = {*tokens_D.tolist()}
    for salt, unread in (("one", _LATE[:300]), ("other", _LATE[200:400]), ("third", ())):
        drafted = {token for token, _ in grown(runner, opened, tokens_D, unread, salt)}
        assert drafted & {*unread} or not unread
        assert drafted <= everybodys | {*unread}
    assert tokens_D.tolist().count(_LATE[250]) == 2


@pytest.mark.parametrize("salt", ["", "a tenant"])
def test_tokens_of_a_text_are_drafted(
    salt: str, shared: HeadArtefact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tenant and without one. The answer is that of plain decoding."""
    witness_WH = Target.named(_MODEL).embedding_VH[artefact.witness_ids(4096)]
    artefact.save(tmp_path, replace(shared, witness_WH=witness_WH, origin=Origin(_MODEL, "ab" * 32, "code", "mit")), "")
    drafted: set[int] = set()
    propose = Eagle3.propose

    def recorded(self: Eagle3, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        drafts = propose(self, views, budgets)
        drafted.update(token for draft in drafts for token in draft.tree.tokens)
        return drafts

    monkeypatch.setattr(Eagle3, "propose", recorded)
    made = InputProcessor._request
    monkeypatch.setattr(InputProcessor, "_request", lambda *given: replace(made(*given), salt=salt))
    ids = list(_LATE[:300])
    params = SamplingParams(temperature=0, max_tokens=20)
    with LLM(_MODEL, dtype="float32", device="cpu") as llm:
        strategy = f"{EAGLE3}:head={tmp_path},policy=fixed,k=60,width=30,depth=2,min_p=0.0"
        output = llm.generate([TokensPrompt(prompt_token_ids=ids)], params, strategy=strategy)[0].outputs[0]
        plain = llm.generate([TokensPrompt(prompt_token_ids=ids)], params, strategy="none")[0].outputs[0]
    assert output.token_ids == plain.token_ids
    assert drafted & {*ids}
