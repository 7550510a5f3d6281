"""`parlay train METHOD` for drafters: from a target model to a folder that a strategy can open.

The target writes texts, its hidden states on them (features) are stored, and a drafter is trained on them, measured and
saved.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from parlay.drafters import options as methods
from parlay.drafters.options import EARLY_EXIT
from parlay.models.opening import chosen_device
from parlay.system import threads
from parlay.train.data.features import Featured
from parlay.train.data.preparing import prepare, prepare_distill
from parlay.train.loop import Loop
from parlay.train.options import DrafterTrainOptions
from parlay.train.processes import Processes, processes
from parlay.train.recipes import block, distill, eagle, eagle3, early_exit, kangaroo, mtp, probes, several_heads
from parlay.train.recipes.recipe import HeadRecipe, ModelRecipe
from parlay.train.recipes.target import Target
from parlay.train.saving import make_folder, origin_of, save_head, written_card
from parlay.train.watching import Watch
from parlay.types import ParlayError

DISTILL = "distill"
HELD_OUT = 10
"""One prompt in this many is held out: it is measured and never trained on."""
MEASURED = 64
"""At most this many held-out texts are measured at a time."""


@dataclass(frozen=True, slots=True)
class Method:
    """How to train one kind of drafter: both functions are called with the method's options.

    ``prepare`` writes and returns the texts with their features. ``start`` makes the recipe from the options, the
    target and the texts to train on.
    """

    start: Callable[[Any, Target, Sequence[Featured]], HeadRecipe | ModelRecipe]
    prepare: Callable[[Any], list[Featured]] = prepare


METHODS = {
    methods.BITA: Method(probes.start_bita),
    methods.BLOCK_DRAFTER: Method(block.start),
    methods.BLOCKWISE: Method(several_heads.start_blockwise),
    DISTILL: Method(distill.start, prepare_distill),
    methods.DYNAMO: Method(mtp.start_dynamo),
    EARLY_EXIT: Method(early_exit.start),
    methods.EAGLE: Method(eagle.start),
    methods.EAGLE3: Method(eagle3.start),
    methods.HYDRA: Method(several_heads.start_hydra),
    methods.KANGAROO: Method(kangaroo.start),
    methods.MEDUSA: Method(several_heads.start_medusa),
    methods.MLP_SPECULATOR: Method(several_heads.start_mlp_speculator),
    methods.MTP: Method(mtp.start),
    methods.PASS: Method(probes.start_pass),
    methods.PPD: Method(probes.start_ppd),
    methods.REDRAFTER: Method(several_heads.start_redrafter),
    methods.STREAMING: Method(probes.start_streaming),
}
"""Each method by its name, which is also the name of the strategy that drafts with its result (except `DISTILL`)."""


def train(method: str, options: DrafterTrainOptions) -> str:
    """Run all stages, skipping those whose files are already there; return the result in one line.

    If torchrun started several processes, the first one writes the texts, and the drafter.
    """
    where = processes()
    threads.settle(options.threads)
    for folder in (options.work, options.out):
        make_folder(folder)
    try:
        with where.first_alone():
            texts = METHODS[method].prepare(options)
        found = Target.named(options.model, chosen_device(options.device))
        return fit(method, options, replace(found, config=options.layer(found.config)), texts, where)
    except KeyboardInterrupt:
        print(f"stopped: the same command goes on from {options.work}", file=sys.stderr, flush=True)
        raise


def fit(
    method: str,
    options: DrafterTrainOptions,
    target: Target,
    texts: Sequence[Featured],
    where: Processes | None = None,
) -> str:
    """Train a drafter on the texts that `parted` does not hold out, and save it with its card; return one line.

    ``where``: see `Loop`.
    """
    heldout, trained = parted(texts)
    if not trained:
        raise ParlayError("there are too few texts to train on: give more --prompts or --texts, or raise --shards")
    if not _answered(texts):
        heldout, trained = whole(heldout), whole(trained)
    torch.manual_seed(options.seed)
    state = options.work / f"{method}.safetensors"
    learned = whole(trained) if options.whole else trained
    leads = where is None or where.rank == 0
    place = nullcontext() if target.device.type == "cpu" else target.device  # a device context slows every operator
    with place, Watch(f"Training {method}", None if leads else False) as watch:
        recipe = METHODS[method].start(options, target, trained)
        recipe.module.to(target.device)
        reached = Loop(recipe, options, state, where).run(learned, heldout[:MEASURED], watch)
    if not leads:
        return f"{options.out}: written by another process"
    card = written_card(method, options, reached, trained, origin_of(options))
    if isinstance(recipe, ModelRecipe):
        recipe.save(options.out, card)
    else:
        save_head(method, options, target, recipe, heldout=heldout, expected=reached.acceptance[0], card=card)
    return f"{options.out}: {reached}"


def parted(texts: Sequence[Featured]) -> tuple[list[Featured], list[Featured]]:
    """Divide the texts into held-out ones and ones to train on.

    One prompt in `HELD_OUT` is held out, with all answers to it: the same prompt asked again mostly gets the same
    answer. Only texts with an answer by the target are held out; if there are none, any text may be.
    """
    measured = {id(text) for text in _answered(texts) or texts}
    numbers: dict[tuple[int, ...], int] = {}
    parts: tuple[list[Featured], list[Featured]] = [], []
    for text in texts:
        prompt = tuple(text.ids_T[: text.answer].tolist())
        held_out = id(text) in measured and numbers.setdefault(prompt, len(numbers)) % HELD_OUT == 0
        parts[not held_out].append(text)
    return parts


def whole(texts: Sequence[Featured]) -> list[Featured]:
    """Return the texts with ``answer`` moved forward, so that prompts are trained on as well.

    The beginning that the first and the last text share, such as a system prompt, stays out. So do at least two tokens
    of each text: in most models, the first token's hidden state is unlike all others.
    """
    answers = _answered(texts) or texts
    head_T = answers[0].ids_T[: _shared(answers[0].ids_T, answers[-1].ids_T)]
    return [replace(text, answer=max(2, min(text.answer, _shared(text.ids_T, head_T)))) for text in texts]


def _answered(texts: Sequence[Featured]) -> list[Featured]:
    """Return the texts that hold an answer by the target."""
    return [text for text in texts if text.answer < len(text.ids_T)]


def _shared(one_T: Tensor, other_T: Tensor) -> int:
    """Return how many tokens at the beginning of both are the same."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one_T.tolist(), other_T.tolist(), strict=False))
    )
