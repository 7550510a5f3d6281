"""Set-block: mask rows of the verifying forward are the next draft, and the text is plain decoding's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from parlay import LLM, SamplingParams
from parlay.drafters.options import SetBlockOptions
from parlay.drafters.resources import Resources
from parlay.drafters.self_speculation.set_block import SetBlock
from parlay.engine import Engine
from parlay.llm.likelihood import log_likelihoods
from parlay.models.families.reading import read_config
from parlay.options import UsageError
from parlay.router.policies import Fixed
from parlay.sampling.rules import SharedNoise
from parlay.testing.conformance.stage import Steady
from parlay.testing.diffusion import save_diffusion
from parlay.testing.toys import ToyRunner
from parlay.types import (
    CanvasSpec,
    Draft,
    Metrics,
    NoiseKey,
    Observation,
    Request,
    Strategy,
    Tree,
    Verdict,
    trees,
)
from tests.drafters.sight import Sight, no_runner, propose

VOCAB, MASK, CYCLE, BLOCK = 24, 23, 7, 4


def counting(ids: Sequence[int]) -> Tensor:
    """Logits of a text that counts up; a mask row knows how far it stands behind the last token that is none."""
    behind = next(back for back, token in enumerate(reversed(ids)) if token != MASK)
    likeliest = (ids[-1 - behind] + behind + 1) % CYCLE
    return 5.0 * torch.nn.functional.one_hot(torch.tensor(likeliest), VOCAB).float()


def resources(shift: bool = True) -> Resources:
    runner = ToyRunner(counting, VOCAB, canvas=CanvasSpec(MASK, block=BLOCK, shift=shift))
    return Resources(VOCAB, no_runner, target=runner.spec)


class AsMasks(ToyRunner):
    """A toy whose canvas rows read as the text before them and masks up to their own place."""

    def __init__(self, shift: bool) -> None:
        super().__init__(self._logits, VOCAB, canvas=CanvasSpec(MASK, block=BLOCK, shift=shift))
        self._own = 0 if shift else 1

    def _logits(self, ids: Sequence[int]) -> Tensor:
        if ids[-1] != MASK:
            return counting(ids)
        end = list(ids).index(MASK)
        own = len(ids) - end - BLOCK  # the toy has the whole chain, and then the chain as far as this row
        return counting([*ids[:end], *[MASK] * (own - self._own)])


def decode(runner: ToyRunner, options: SetBlockOptions, budget: int = 4) -> tuple[list[int], Metrics]:
    engine = Engine(runner, Steady())
    drafter = SetBlock(Resources(VOCAB, no_runner, target=runner.spec), options)
    request = Request(id="r", prompt=(1, 2), params=SamplingParams(temperature=0, max_tokens=41), key=NoiseKey(0))
    engine.add(request, Strategy("set-block", (drafter,), SharedNoise(), Fixed(budget)))
    tokens: list[int] = []
    while True:
        for event in engine.step():
            tokens += [one.token for one in event.committed]
            if event.metrics is not None:
                assert event.error is None
                return tokens, event.metrics


@pytest.mark.parametrize(("shift", "depth"), [(True, 4), (False, 3)])
def test_a_model_that_knows_what_comes_writes_its_whole_draft_in_each_step(shift: bool, depth: int) -> None:
    """The first step guesses only; then each brings the draft and one token. Without shift a mask guesses the root."""
    tokens, metrics = decode(AsMasks(shift), SetBlockOptions(groups=5, width=1))
    assert tokens == [(3 + place) % CYCLE for place in range(41)]
    assert metrics.steps == 1 + -(-40 // (depth + 1))


def test_masks_stand_below_the_likeliest_nodes_and_see_their_own_chain() -> None:
    drafter = SetBlock(resources(), SetBlockOptions(masks=2, groups=2, width=2))
    first = propose(drafter, Sight(tokens=[1, 2]), 8)
    assert (first.tree, first.probes, first.together) == (Tree((MASK, MASK), (-1, 0)), 2, 2)
    seen = ((7, 1, 2), (3, MASK, 4), (6, 5, MASK))
    drafter.observe([Observation(Sight(tokens=[1, 2, 7]), first, Verdict((), (7,)), top_k=seen)])
    second = propose(drafter, Sight(tokens=[1, 2, 7]), 2)
    assert second.tree.tokens[:2] == (3, 6), "the mask is no token of a text"
    assert (second.probes, second.together) == (4, 4)
    assert second.tree.parents == (-1, 0, -1, 2, 1, 4)


def test_what_its_guesses_were_worth_shapes_the_next_tree() -> None:
    drafter = SetBlock(resources(), SetBlockOptions(masks=1, width=2))
    before = drafter.acceptance[0][0]
    tokens = [1, 2, 7]
    first = propose(drafter, Sight(tokens=tokens[:2]), 8)
    drafter.observe([Observation(Sight(tokens=tokens), first, Verdict((), (7,)), top_k=((7,), (3, 4, 5)))])
    draft = propose(drafter, Sight(tokens=tokens), 1)
    drafter.observe([Observation(Sight(tokens=[*tokens, 9]), draft, Verdict((), (9,)), top_k=((9,), (1,), (2,)))])
    assert drafter.acceptance[0][0] < before, "neither 3 nor 4 came"


def test_a_draft_for_a_text_that_was_cut_is_none() -> None:
    drafter = SetBlock(resources(), SetBlockOptions(masks=1))
    first: Draft = propose(drafter, Sight(tokens=[1, 2]), 8)
    drafter.observe([Observation(Sight(tokens=[1, 2, 7]), first, Verdict((), (7,)), top_k=((7,), (3, 4, 5)))])
    other = propose(drafter, Sight(tokens=[1, 2, 8]), 8)
    assert other.probes == len(other)


def test_targets_without_both_modes_are_refused() -> None:
    target = resources().target
    assert target is not None
    filler = CanvasSpec(MASK, block=BLOCK, text="block")
    for canvas, why in ((None, "toy fills none"), (filler, "toy only fills places")):
        with pytest.raises(UsageError, match=f"writes token by token and fills masked places: {why}"):
            SetBlock(Resources(VOCAB, no_runner, target=replace(target, canvas=canvas)), SetBlockOptions())
    with pytest.raises(UsageError, match="masks=1 guesses nothing with toy; give 2 or more"):
        SetBlock(resources(shift=False), SetBlockOptions(masks=1))


@pytest.mark.parametrize("name", ["nemotron", "wedlm-qwen3"])
def test_a_checkpoint_with_both_modes_writes_the_plain_text(name: str, tmp_path: Path) -> None:
    save_diffusion(name, tmp_path)
    llm = LLM(str(tmp_path), dtype="float32")
    params = [SamplingParams(temperature=t, seed=3, max_tokens=24, ignore_eos=True) for t in (0, 0.8)]
    prompts = [[5, 9, 11], list(range(3, 40))]
    plain = llm.generate(prompts, params, strategy="none")
    drafted = llm.generate(prompts, params, strategy="set-block:policy=fixed,groups=3")
    assert [each.outputs[0].token_ids for each in drafted] == [each.outputs[0].token_ids for each in plain]
    assert drafted[0].outputs[0].metrics.draft_tokens > 0


@pytest.mark.parametrize("name", ["nemotron", "wedlm-qwen3"])
def test_no_strategy_writes_the_mask_and_the_other_tokens_share_its_probability(name: str, tmp_path: Path) -> None:
    save_diffusion(name, tmp_path)
    tensors, canvas = load_file(tmp_path / "model.safetensors"), read_config(tmp_path).canvas
    assert canvas is not None
    head_VH = next(tensor for key, tensor in tensors.items() if key in ("lm_head.weight", "diffusion_head.weight"))
    head_VH[canvas.mask_id] *= 100  # wherever its logit is positive, it is the largest
    save_file(tensors, tmp_path / "model.safetensors")
    llm = LLM(str(tmp_path), dtype="float32")
    params = [SamplingParams(temperature=t, seed=3, max_tokens=24, ignore_eos=True, logprobs=0) for t in (0, 0.8)]
    biased = [replace(each, logit_bias={canvas.mask_id: -math.inf}, logprobs_mode="processed") for each in params]
    prompts = [[5, 9, 11], list(range(3, 40))]
    wanted = [output.outputs[0] for output in llm.generate(prompts, biased, strategy="none")]
    for strategy in ("none", "set-block:policy=fixed,groups=3", "prompt-lookup"):
        found = [output.outputs[0] for output in llm.generate(prompts, params, strategy=strategy)]
        assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
        assert found[0].cumulative_logprob == wanted[0].cumulative_logprob
    (read,) = log_likelihoods(llm, [((*prompts[0], *wanted[0].token_ids), len(prompts[0]))])
    assert read == pytest.approx(wanted[0].cumulative_logprob)


def test_masks_are_as_many_as_are_likely_to_be_read() -> None:
    """Six at first; the whole block below the end of a draft that is surely right, and none below its inner nodes."""
    runner = ToyRunner(counting, 512, canvas=CanvasSpec(511, block=12, shift=True))
    drafter = SetBlock(Resources(512, no_runner, target=runner.spec), SetBlockOptions(width=1))
    sight = Sight(tokens=[1])
    draft = propose(drafter, sight, 3)
    assert draft.probes == 6
    for _ in range(20):
        path = tuple(range(len(draft) - draft.probes))
        committed = tuple(range(len(sight.tokens) + 1, len(sight.tokens) + 2 + len(path)))
        sight = Sight(tokens=[*sight.tokens, *committed])
        depths, after = trees.depths(draft.tree), len(sight.tokens) + 1
        guesses = ((0, 0), *[(max(0, after + depth - len(path) - 1), 0) for depth in depths])
        drafter.observe([Observation(sight, draft, Verdict(path, committed), top_k=guesses)])
        draft = propose(drafter, sight, 3)
    assert len(draft) - draft.probes == 3
    assert (draft.probes, draft.tree.parents[3]) == (12, 2)
