"""Saves a trained head with its origin, its card, and a proof that other machines compute the same with it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from torch import Tensor

from parlay.drafters.heads.proving import prove
from parlay.drafters.resources import Resources
from parlay.heads import artefact
from parlay.heads.artefact import HeadArtefact, Origin
from parlay.heads.hub import front_matter
from parlay.heads.opening import opened_artefact
from parlay.models.fetch.origin import licence, public_name, weights_sha256
from parlay.strategies.building import build
from parlay.strategies.spelling import parse
from parlay.train.data.batches import in_order
from parlay.train.data.features import Featured
from parlay.train.loop import Progress
from parlay.train.options import DrafterTrainOptions
from parlay.train.recipes.recipe import HeadRecipe
from parlay.train.recipes.target import Target
from parlay.types import Exactness, ParlayError, RunnerSpec


def make_folder(folder: Path) -> None:
    """Make the output folder before anything is computed. Raises ParlayError if it can't be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ParlayError(f"can't write to the folder {folder}: {error.strerror}") from error


def origin_of(options: DrafterTrainOptions) -> Origin:
    """Return the origin of a head that these options train; its licence is the target's unless the options name one."""
    model = options.model
    return Origin(public_name(model), weights_sha256(model), options.domain, options.licence or licence(model))


def save_head(
    method: str,
    options: DrafterTrainOptions,
    target: Target,
    recipe: HeadRecipe,
    *,
    heldout: Sequence[Featured],
    expected: float,
    card: str,
) -> None:
    """Write the head's folder: weights, config, proof and ``card``.

    ``expected`` is the share of held-out first drafts that are right.
    """
    with target.device:
        settings = recipe.settings(in_order(heldout, options.batch_tokens, options.longest))
    witness_WH = target.embedding_VH.cpu()[artefact.witness_ids(target.config.vocab_size)]
    made = HeadArtefact(
        method,
        target.config,
        {**settings, "expected": round(expected, 4)},
        {name: tensor.detach().cpu() for name, tensor in recipe.tensors().items()},
        witness_WH,
        origin_of(options),
    )
    text = max(heldout, key=lambda each: len(each.ids_T))
    layers = target.stored_layers()
    states = dict(zip(layers, text.states_TF.cpu().chunk(len(layers), -1), strict=True))
    artefact.save(options.out, with_proof(made, target, text.ids_T.tolist(), states), card)


def written_card(
    method: str, options: DrafterTrainOptions, reached: Progress, trained: Sequence[Featured], origin: Origin
) -> str:
    """Return the card of a drafter that was trained on the texts ``trained``."""
    asked = f"{options.prompts.name} and prompts of its own" if options.prompts else "prompts of its own"
    read = f"; it read those of {options.texts.name}" if options.texts else ""
    shares = ", ".join(f"{100 * share:.1f} %" for share in reached.acceptance)
    tokens = sum(len(text.ids_T) for text in trained)
    answers = sum(len(text.ids_T) - text.answer for text in trained) if options.written_shards else 0
    data = {"loss": round(reached.loss, 4), "rows": reached.tokens, "texts": len(trained), "tokens": tokens}
    return (
        f"{front_matter(method, origin, reached.acceptance, data)}\n"
        f"# {method} for {origin.target}\n\n"
        f"- Target: {origin.target}. It drafts for that model alone, and no text depends on it.\n"
        f"- Licence: {origin.licence or 'not known: that of the target holds for this too'}.\n"
        f"- Texts: {origin.domain}. {len(trained)} texts of {tokens:,} tokens; the target's answers to "
        f"{asked} (seed {options.seed}) are {answers:,} of these{read}.\n"
        f"- Training: {reached.tokens:,} rows in {reached.step} steps, {reached.seconds:.0f} s; "
        f"loss {reached.loss:.3f}.\n"
        f"- Drafts right up to each depth, best guess alone, on the answers that this training set aside: {shares}. "
        "Other prompts give other shares; `parlay bench PROMPTS` compares heads on the same ones.\n"
    )


def with_proof(made: HeadArtefact, target: Target, ids: Sequence[int], states: Mapping[int, Tensor]) -> HeadArtefact:
    """Return the head with a proof: what its drafter proposes now after ``ids``.

    ``states`` ``[T, H]`` are the target's hidden states of ``ids``, by layer.
    """
    stored = artefact.as_stored(made)
    resources = Resources(
        vocab_size=target.config.vocab_size,
        open_runner=_no_model,
        find_head=lambda method, name: opened_artefact(stored, target.embedding_VH.cpu()),
        target=_spec(target),
    )
    drafter = build(parse(made.method), resources)
    assert drafter is not None, "methods draft"
    return replace(made, proof=prove(drafter, ids, states))


def _spec(target: Target) -> RunnerSpec:
    """Return the spec of a runner with every ability that drafters require; no such runner computes anything."""
    config = target.config
    return RunnerSpec(
        name="target",
        vocab_size=config.vocab_size,
        max_context=config.max_context,
        tree="tree",
        exactness=Exactness.SEED,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        device="cpu",
        dtype="float32",
        kernels="none",
        layer_skip=True,
        features=True,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )


def _no_model(name: str) -> NoReturn:
    raise ParlayError(f"a head drafts without the model {name}")
