"""A diffusion model drafts on canvases: the tree of its likeliest guesses, whatever its rows see."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parlay import LLM, SamplingParams, models
from parlay.drafters.draft_models.canvas_draft import CanvasDraft
from parlay.drafters.options import CanvasDraftOptions
from parlay.drafters.resources import Resources
from parlay.options import LoadOptions, UsageError
from parlay.testing.checkpoints import save_random
from parlay.testing.diffusion import LAYOUTS, save_diffusion
from parlay.testing.toy_tokenizers import toy_tokenizer
from parlay.testing.toys import ToyRunner
from parlay.types import CanvasSpec, Ends, ParlayError, Segment
from tests.drafters.sight import SAMPLED, Sight, propose, token_paths

VOCAB, MASK = 12, 11
ODDS = (0.6, 0.3, 0.1)


def by_places(ids: Sequence[int]) -> Tensor:
    """Give the tokens p, p + 1 and p + 2 the `ODDS` at place p of a canvas, before which stands all of it."""
    place = (len(ids) - list(ids).index(MASK)) % 4 if MASK in ids else 9
    chances = torch.full((VOCAB,), 1e-6)
    chances[place : place + 3] = torch.tensor(ODDS)
    return chances.log()


class Counting(ToyRunner):
    """Remembers its segments."""

    def __init__(self, canvas: CanvasSpec | None) -> None:
        super().__init__(by_places, VOCAB, canvas=canvas)
        self.segments: list[Segment] = []

    def forward(self, segments, *others, **named):  # type: ignore[no-untyped-def]
        self.segments += segments
        return super().forward(segments, *others, **named)


def drafter(canvas: CanvasSpec | None, **options: float) -> tuple[CanvasDraft, Counting]:
    runner = Counting(canvas)
    resources = Resources(VOCAB, lambda name: runner, target=ToyRunner(by_places, VOCAB).spec)
    return CanvasDraft(resources, CanvasDraftOptions(model="m", **options)), runner  # type: ignore[arg-type]


def test_the_draft_is_the_tree_of_the_likeliest_paths() -> None:
    """As if no place depended on another: 0.6 * 0.6 * 0.3 is above the bound, 0.6 * 0.1 and 0.3 * 0.3 are not."""
    made, runner = drafter(CanvasSpec(MASK, block=3), min_p=0.105, width=3)
    found = propose(made, Sight(tokens=[1, 2]), 20)
    one_place = {(0,), (1,), (0, 1), (0, 2), (1, 1)}
    assert token_paths(found) == one_place | {(0, 1, 2), (0, 1, 3), (0, 2, 2), (1, 1, 2)}
    assert found.scores[0] == pytest.approx(0.6, abs=1e-4)
    assert [segment.together for segment in runner.segments] == [3]
    assert len(propose(made, Sight(tokens=[1, 2]), 2)) == 2, "no more than the budget"


def test_further_steps_see_the_surest_places() -> None:
    made, runner = drafter(CanvasSpec(MASK, block=3), steps=2, width=1)
    propose(made, Sight(tokens=[1, 2]), 3)
    assert [segment.tree.tokens for segment in runner.segments] == [(MASK,) * 3, (0, 1, MASK)]


def test_a_canvas_ends_where_the_block_of_the_text_does() -> None:
    made, runner = drafter(CanvasSpec(MASK, block=4, text="block"))
    propose(made, Sight(tokens=[1, 2, 3, 4, 5]), 8)
    assert runner.segments[-1].together == 3
    propose(made, Sight(sequence=2, tokens=[1, 2, 3, 4, 5]), 2)
    assert runner.segments[-1].together == 2


def test_a_forward_runs_no_token_twice_and_no_place_that_guesses_nothing() -> None:
    """The root stays cached, so the next draft feeds what was committed since; the last of shifted places is no row."""
    made, runner = drafter(CanvasSpec(MASK, block=3, shift=True), width=1)
    tokens = [1, 2, 3]
    assert len(propose(made, Sight(tokens=tokens), 3)) == 3
    tokens += [4, 5]
    propose(made, Sight(tokens=tokens), 3)
    assert [segment.pending for segment in runner.segments] == [(1, 2, 3), (4, 5)]
    assert [(segment.tree.tokens, segment.together) for segment in runner.segments] == [((MASK, MASK), 2)] * 2
    propose(made, Sight(tokens=tokens), 3)
    assert runner.segments[-1].pending == (5,), "where nothing was committed the root runs again"


def test_sampled_requests_draft_with_their_own_noise() -> None:
    """Some first guesses are not the likeliest then, and a rank never counts for more than the one before it."""
    made, _ = drafter(CanvasSpec(MASK, block=3), min_p=0, width=2)
    firsts = {propose(made, Sight(place, [1] * (2 + place), SAMPLED), 4).tree.tokens[0] for place in range(8)}
    assert len(firsts) > 1


@pytest.mark.parametrize("name", ["llada", "dream", "sdar", "nemotron"])
def test_every_kind_of_diffusion_model_drafts_and_changes_no_token(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are longer than what is fed at once, and longer than a block."""
    monkeypatch.setattr("parlay.drafters.draft_models.draft_sequences._CHUNK", 16)
    save_random("llama", tmp_path / "target")
    toy_tokenizer(64).save_pretrained(tmp_path / "target")
    slow = save_diffusion(name, tmp_path / "draft")
    llm = LLM(str(tmp_path / "target"), dtype="float32")
    prompts = [[5, 9, 11, 4], list(range(3, 53))]
    params = [SamplingParams(temperature=t, seed=3, max_tokens=20, ignore_eos=True) for t in (0, 0.8)]
    plain = llm.generate(prompts, params, strategy="none")
    spec = f"canvas-draft:model={tmp_path / 'draft'},policy=fixed,min_p=0,steps=2,k=4"
    drafted = llm.generate(prompts, params, strategy=spec)
    assert [each.outputs[0].token_ids for each in drafted] == [each.outputs[0].token_ids for each in plain]
    assert drafted[0].outputs[0].metrics.draft_tokens > 0

    resources = Resources(64, lambda name: models.load(name, LoadOptions(dtype="float32"), cache_tokens=512))
    made = CanvasDraft(resources, CanvasDraftOptions(model=str(tmp_path / "draft"), min_p=0, width=1))
    layout, text = LAYOUTS[name], prompts[1]
    places = min(4, (layout.block or 4) - len(text) % (layout.block or 4) if layout.block else 4)
    logits = slow.logits([*text, *[60] * places], places)[len(text) - layout.shift :][:places]
    logits[:, 60] = -torch.inf
    assert propose(made, Sight(tokens=text), 4).tree.tokens == tuple(logits.argmax(-1).tolist())


def test_what_cannot_draft_so_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="m fills no canvases: choose a diffusion model, or draft-model"):
        drafter(None)
    with pytest.raises(UsageError, match="name a diffusion model, as in canvas-draft:model=FOLDER"):
        CanvasDraft(Resources(VOCAB, lambda name: Counting(None)), CanvasDraftOptions())
    with pytest.raises(UsageError, match="canvases of m begin as noise: choose a model with a mask"):
        drafter(CanvasSpec(-1, block=4, noise=VOCAB))
    with pytest.raises(UsageError, match="m writes token by token too: choose draft-model for it"):
        drafter(CanvasSpec(MASK, block=4, ordered=True))
    with pytest.raises(UsageError, match="m fills whole answers; choose a model that fills blocks"):
        drafter(CanvasSpec(MASK, ends=Ends("length", 1, 2, 3)))
    save_diffusion("sdar", tmp_path, vocab=4096)
    for strategy in ("draft-model", "universal-draft"):
        with pytest.raises(ParlayError, match="can't draft token by token"):
            LLM("parlay-mini", strategy=f"{strategy}:model={tmp_path}").generate(["x"])
