"""The stages of the kit: toys with known logits, and a tiny native decoder with random weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parlay.drafters.copying.prompt_lookup import PromptLookup, PromptLookupOptions
from parlay.drafters.remote.remote import SOURCE as REMOTE
from parlay.drafters.remote.service import DraftService, LocalLink
from parlay.drafters.resources import Resources
from parlay.drafters.stores.datastore_file import Datastore
from parlay.drafters.stores.state_building import states_of
from parlay.drafters.stores.state_store import VERSION, MappedStates, StateHeader
from parlay.models.choosing import choose_forward
from parlay.models.config import DecoderConfig
from parlay.models.native import NativeRunner
from parlay.ngrams import NgramModel, NgramOptions, Vocabulary, build_from_ids
from parlay.strategies.built import RunnerCache
from parlay.testing.checkpoints import VOCAB_SIZE, random_model
from parlay.testing.conformance.stage import Stage
from parlay.testing.random_heads import random_heads
from parlay.testing.reference import LogitsOf
from parlay.testing.toy_tokenizers import toy_tokenizer
from parlay.testing.toys import RandomLogits, ToyRunner, with_mask
from parlay.types import CanvasSpec, Runner, RunnerSpec, Segment

_CPU = torch.device("cpu")


def toy_stage(
    name: str,
    vocab_size: int = 24,
    *,
    tree: Literal["tree", "chain", "none"] = "tree",
    cut: int = 1,
    in_flight: int = 1,
    checks: frozenset[str] = frozenset(),
) -> Stage:
    """Make a stage with a `ToyRunner`. Its draft model has the same logits, without the part that depends on the whole
    text, so it is often right."""
    canvas = CanvasSpec(vocab_size - 1, block=4, shift=True)  # causal, so it changes no other strategy
    logits_of = with_mask(RandomLogits(canvas.mask_id), canvas.mask_id)
    draft = with_mask(RandomLogits(canvas.mask_id, drift=0.0), canvas.mask_id)

    def open_runner(capacity: int) -> Runner:
        return ToyRunner(
            logits_of, vocab_size, capacity=capacity, tree=tree, cut=cut, canvas=canvas, in_flight=in_flight
        )

    shelf = RunnerCache(lambda _: ToyRunner(draft, vocab_size, canvas=canvas))
    resources = _resources(shelf, "toy", open_runner(1).spec)
    resources = _with_datastore(resources, logits_of, open_runner)
    return Stage(name, open_runner, logits_of, vocab_size, resources, checks=checks)


def runner_stage(
    name: str, open_runner: Callable[[int], Runner], draft: Callable[[], Runner], noise_bound: float = 0.0
) -> Stage:
    """Make a stage with a real runner. Another instance of it recomputes logits, each time without cached tokens."""
    judge = open_runner(8192)
    vocab_size = judge.spec.vocab_size
    resources = _resources(RunnerCache(lambda _: draft()), "draft", judge.spec)
    logits_of = recomputed(judge)
    resources = _with_datastore(resources, logits_of, open_runner)
    return Stage(name, open_runner, logits_of, vocab_size, resources, noise_bound)


def _resources(shelf: RunnerCache, draft: str, target: RunnerSpec) -> Resources:
    """Make the resources of a stage. The draft model's tokenizer differs from the target's. The target's weights are
    rounded already."""
    return Resources(
        target.vocab_size,
        shelf,
        default_draft=draft,
        tokenizer=toy_tokenizer(target.vocab_size),
        open_tokenizer=lambda _: toy_tokenizer(target.vocab_size, seed=1),
        target=replace(target, cheaper=target.hides),  # so that drafters that would be slower here run, too
        find_head=random_heads(target),
        open_drafter=lambda _: copying_link(target.vocab_size),
        round_weights=lambda bits: None,
    )


def copying_link(vocab_size: int) -> LocalLink:
    """A draft service in this process that copies within each text."""
    copier = PromptLookup(Resources(vocab_size, RunnerCache(_no_model)), PromptLookupOptions())
    return LocalLink(DraftService(copier, vocab_size, 1 << 20), REMOTE)


def _no_model(name: str) -> NoReturn:
    raise AssertionError(f"no model drafts here, so {name} is not opened")


def _with_datastore(resources: Resources, logits_of: LogitsOf, open_runner: Callable[[int], Runner]) -> Resources:
    """Add a datastore, its hidden states and an n-gram model, all made of texts that the target writes. Every file name
    opens them."""

    @cache
    def texts() -> list[list[int]]:
        found = [[start % resources.vocab_size] for start in range(3)]
        for text in found:
            while len(text) < 80:
                text.append(int(logits_of(text).argmax()))
        return found

    @cache
    def open_datastore(file: str) -> Datastore:
        return Datastore.build([np.array(text) for text in texts()], resources.vocab_size)

    @cache
    def open_ngrams(file: str) -> NgramModel:
        return ngram_model(texts(), resources.vocab_size)

    @cache
    def open_states(file: str) -> MappedStates:
        return states_in_memory(open_datastore(file), open_runner(4096))

    return replace(resources, open_datastore=open_datastore, open_ngrams=open_ngrams, open_states=open_states)


def ngram_model(texts: Iterable[Sequence[int]], vocab_size: int) -> NgramModel:
    """Make an n-gram model of trigrams with counts. Its file is deleted."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "model"
        build_from_ids(file, texts, Vocabulary(vocab_size), NgramOptions(order=3, counts=True, memory=16))
        return NgramModel.open(file)


class EveryState:
    """An index that compares a query with every state; see `parlay.drafters.stores.state_store.Index`."""

    def __init__(self, states_NH: NDArray[np.float16]) -> None:
        self._states_NH = states_NH.astype(np.float64)

    def search(self, queries_QH: NDArray[np.float32], count: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        distances_QN = ((self._states_NH - queries_QH[:, None]) ** 2).sum(2)
        nearest_QC = distances_QN.argsort(1, kind="stable")[:, :count]
        return np.take_along_axis(distances_QN, nearest_QC, 1), nearest_QC


def states_in_memory(store: Datastore, runner: Runner) -> MappedStates:
    """Return a datastore in memory with the hidden states of ``runner`` at its tokens."""
    parts, spec = list(states_of(store, runner)), runner.spec
    states_NH, places_N = (np.concatenate(each) for each in zip(*parts, strict=True))
    header = StateHeader(
        version=VERSION,
        model=spec.name,
        weights="",
        layer=spec.num_layers - 1,
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        states=len(states_NH),
        datastore=0,
        sizes={},
        checksums={},
    )
    names = [f"text {number}" for number in range(store.header.documents)]
    return MappedStates(store, header, states_NH, places_N, names=names, index=EveryState(states_NH))


def recomputed(runner: Runner) -> LogitsOf:
    """Return a function that computes the runner's logits after any text, each in a new sequence that shares no
    prefix."""
    names = itertools.count()

    @lru_cache(maxsize=4096)
    def compute(ids: tuple[int, ...]) -> Tensor:
        name = next(names)
        cached = runner.open(name, ids, salt=f"recomputed {name}")
        assert cached == 0, "a salt that nobody used finds a prefix"
        assert runner.reserve(name, len(ids)), "no room for a single text"
        out = runner.forward([Segment(name, ids, logits_from=len(ids) - 1)])
        runner.release(name)
        return out.logits_RV[0].clone()

    return lambda ids: compute(tuple(ids))


def tiny_llama(context: int) -> DecoderConfig:
    """Return the config of `random_model`'s Llama."""
    return DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-6,
        max_context=context,
        canvas=CanvasSpec(VOCAB_SIZE - 1, block=4),
    )


def native_stage(dtype: torch.dtype, context: int = 4096, device: torch.device = _CPU, *, graphs: bool = True) -> Stage:
    """Make a stage with a tiny Llama of random weights in the native decoder. Its draft model is the same model with
    noise added to the weights.

    ``graphs``: whether CUDA devices run steps as CUDA graphs.
    """
    config = tiny_llama(context)
    weights = {name: tensor.to(dtype) for name, tensor in random_model("llama").state_dict().items()}
    disturbed = {name: tensor + 0.1 * tensor.std() * torch.randn_like(tensor) for name, tensor in weights.items()}

    def open_runner(weights: Mapping[str, Tensor], capacity: int) -> Runner:
        runner = NativeRunner(
            config,
            {name: tensor.clone() for name, tensor in weights.items()},
            dtype=dtype,
            device=device,
            max_tokens_cached=capacity,
            name="tiny",
            make_forward=partial(choose_forward, graphs=graphs),
        )
        runner.round_weights(4, weights)
        return runner

    name = f"native {str(dtype).removeprefix('torch.')}{'' if device == _CPU else f' on {device.type}'}"
    return runner_stage(name, partial(open_runner, weights), partial(open_runner, disturbed, 8192))
