"""The loop that trains heads: for a time or a number of updates, with checkpoints, held-out acceptance, early stopping.

A run resumes from one safetensors file. The file is replaced atomically, so a killed run loses one interval at most.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from parlay.options import Options, UsageError, option
from parlay.system.user_cache import saved_whole
from parlay.train.data.batches import TrainingBatch, endless, in_order
from parlay.train.data.features import Featured
from parlay.train.optimizers import AUTO, PRECISIONS, adam, learning_rate, mixed, muon
from parlay.train.processes import Alone, LossOf, Processes
from parlay.train.recipes.recipe import Recipe
from parlay.train.watching import Watch
from parlay.types import ParlayError

MOST_GRADIENT = 1.0
"""The L2 norm to which gradients are clipped."""
_PATIENCE = 3
"""Training stops after this many measurements in a row without a better acceptance."""
_TRAIN_PER_MEASURE = 4
"""Training takes at least this many times as long as measuring: one pass through a target takes minutes on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions(Options):
    """Options of the training loop: its length, batch size, learning rates and checkpoint interval."""

    minutes: float = option(60.0, "minutes to train, not counting the time to write the texts", low=0.001)
    updates: int = option(
        0, "stop after this many updates of the weights, whatever time they take; 0: after --minutes", low=0
    )
    batch_tokens: int = option(2048, "trained tokens in a batch", low=8)
    longest: int = option(640, "longest text in tokens; of longer ones only the end is used", low=8)
    matrix_rate: float = option(0.01, "peak learning rate of matrices (Muon)", low=0)
    slow_rate: float = option(5e-4, "peak learning rate of output vocabularies and norms (AdamW)", low=0)
    interval: float = option(120.0, "seconds between checkpoints", low=0.01)
    precision: str = option(
        AUTO, "number type of matrix products: auto is bfloat16 where that is faster", choices=PRECISIONS
    )
    seed: int = option(0, "seed of the order of texts", low=0)

    def share(self, updates: int, seconds: float) -> float:
        """Return how much of the run is done after this many updates and seconds: 0 at the start, 1 at the end."""
        return updates / self.updates if self.updates else seconds / (60 * self.minutes)

    def lasting(self) -> dict[str, str]:
        """Return the options that must stay the same when a run resumes, since they decide what is learned."""
        return {"seed": str(self.seed)}


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a run at one measurement.

    ``tokens`` counts the trained rows, ``seconds`` the time spent in updates, ``loss`` is the mean of the last
    interval, and ``acceptance[d]`` the share of held-out drafts whose first d + 1 tokens are all right.
    """

    step: int
    tokens: int
    seconds: float
    loss: float
    acceptance: tuple[float, ...]

    def __str__(self) -> str:
        rate = self.tokens / max(self.seconds, 1e-9)
        return f"step {self.step}  {self.tokens:,} tokens  {rate:,.0f}/s  loss {self.loss:.3f}  {self.heldout}"

    @property
    def heldout(self) -> str:
        """Return the acceptance on held-out answers as text, in per cent by depth."""
        shares = " ".join(f"{100 * share:.1f}" for share in self.acceptance)
        return f"held-out drafts right by depth: {shares} %"


class Loop:
    """Trains ``recipe.module``. The file ``state`` holds everything that a run needs to resume."""

    def __init__(self, recipe: Recipe, options: LoopOptions, state: Path, where: Processes | None = None) -> None:
        """Make the optimizers.

        ``where``: the processes that train the module together, including this one; None: only this one.
        """
        self._recipe, self._options, self._state, self._where = recipe, options, state, where or Alone()
        parts = ((muon, recipe.matrices, options.matrix_rate), (adam, recipe.slow, options.slow_rate))
        self._optimizers = [(make(list(weights), rate), rate) for make, weights, rate in parts if weights]
        self._step = self._tokens = 0
        self._seconds = self._due = 0.0  # training time so far, and when to measure acceptance next
        self._loss = float("nan")

    def run(
        self,
        texts: Sequence[Featured],
        heldout: Sequence[Featured],
        watch: Watch,
    ) -> Progress:
        """Train until the time or updates are used up, or acceptance stops growing; the module keeps the last weights.

        ``texts`` are trained on, ``heldout`` are measured. Acceptance is measured after each interval. If a measurement
        takes long, intervals without one follow; see `_TRAIN_PER_MEASURE`. If ``watch`` shows no progress bar, each
        measurement prints a line.

        Raises ParlayError if loss or gradient becomes infinite or NaN; the last good checkpoint stays. Also raises
        ParlayError if there are no texts, or if the checkpoint can't be read.
        """
        if not texts or not heldout:
            raise ParlayError("there are too few texts to train on: raise --shards, or give more --texts")
        options, where = self._options, self._where
        self._resume()
        if self._share >= 1 and where.rank == 0:
            more = "--updates" if options.updates else "--minutes"
            print(f"{self._state} is trained already, to step {self._step}: more {more} go on from there", flush=True)
        loss_of = where.loss_of(self._recipe)
        batches = endless(texts, options.batch_tokens, options.longest, options.seed + self._step)
        own = islice(batches, where.rank, None, where.count)
        progress = self._progress(heldout)
        best, since = progress.acceptance, 0
        watch.measured(progress.heldout)
        while self._share < 1 and since < _PATIENCE:
            self._train(loss_of, own, watch)
            if where.rank == 0:
                self._save()
            if self._share < 1 and self._seconds < self._due:
                continue
            progress = self._progress(heldout)
            watch.measured(progress.heldout)
            if where.rank == 0 and not watch.shown:
                print(progress, flush=True)
            since = 0 if sum(progress.acceptance) > sum(best) else since + 1
            best = max(best, progress.acceptance, key=sum)
        return progress

    def _train(self, loss_of: LossOf, batches: Iterator[TrainingBatch], watch: Watch) -> None:
        """Train for one interval."""
        self._recipe.module.train()
        losses: list[float] = []
        until = self._seconds + self._options.interval
        while (self._seconds < until and self._share < 1) or not losses:
            began = time.monotonic()
            losses.append(self._update(loss_of, next(batches)))
            self._seconds += self._where.mean(time.monotonic() - began)
            watch.step(self._share, self._seconds, self._tokens, losses[-1])
        self._loss = sum(losses) / len(losses)

    def _update(self, loss_of: LossOf, batch: TrainingBatch) -> float:
        with mixed(self._options.precision):
            loss = loss_of(batch)
        value = self._where.mean(float(loss.detach()))
        self._check("the loss", value)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self._recipe.module.parameters(), MOST_GRADIENT)
        self._check("the gradient", float(norm))
        factor = learning_rate(self._share)
        for optimizer, peak in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = factor * peak
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._step += 1
        self._tokens += round(self._where.mean(float(batch.known_BR.sum())) * self._where.count)
        return value

    def _check(self, what: str, value: float) -> None:
        """Raise ParlayError if the value is infinite or NaN. Called before the update, so that no weight becomes so."""
        if not math.isfinite(value):
            raise ParlayError(
                f"{what} became {value} at step {self._step}: run again with a lower learning rate; the run resumes "
                f"from the last good weights in {self._state}, if they are there"
            )

    @property
    def _share(self) -> float:
        return self._options.share(self._step, self._seconds)

    def _progress(self, heldout: Sequence[Featured]) -> Progress:
        began = time.monotonic()
        shares = acceptance(self._recipe, heldout, self._options)
        self._due = self._seconds + _TRAIN_PER_MEASURE * self._where.mean(time.monotonic() - began)
        return Progress(self._step, self._tokens, self._seconds, self._loss, shares)

    def _save(self) -> None:
        numbers = torch.tensor([self._step, self._tokens, self._seconds, self._loss], dtype=torch.float64)
        with saved_whole(self._state) as part:
            found = {f"module.{name}": tensor.contiguous() for name, tensor in self._recipe.module.state_dict().items()}
            for number, (optimizer, _) in enumerate(self._optimizers):
                for index, state in optimizer.state_dict()["state"].items():
                    found |= {
                        f"optimizer.{number}.{index}.{name}": torch.as_tensor(each) for name, each in state.items()
                    }
            metadata = {"options": json.dumps(self._options.lasting())}
            save_file({**{name: tensor.clone() for name, tensor in found.items()}, "numbers": numbers}, part, metadata)

    def _resume(self) -> None:
        if not self._state.exists():
            return
        try:
            with safe_open(self._state, "pt") as file:
                self._check_options(json.loads((file.metadata() or {}).get("options", "{}")))
            saved = load_file(self._state)
            self._step, self._tokens = (int(number) for number in saved["numbers"][:2])
            self._seconds, self._loss = saved["numbers"][2:].tolist()
            _restore(saved, self._recipe.module, self._optimizers)
        except UsageError:
            raise
        except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ParlayError(
                f"{self._state} is damaged, or the checkpoint of a run with other options ({reason}): "
                "delete it to start again, or name another folder by --work"
            ) from error

    def _check_options(self, then: Mapping[str, str]) -> None:
        """Raise UsageError if the checkpoint belongs to a run with other ``lasting`` options."""
        for name, value in self._options.lasting().items():
            if then.get(name, value) != value:
                raise UsageError(
                    f"{self._state} is from a run with {name}={then[name]}, not {value}: give {then[name]} to resume "
                    "it, delete the file to start again, or name another folder by --work",
                    name,
                )


def acceptance(recipe: Recipe, texts: Sequence[Featured], options: LoopOptions) -> tuple[float, ...]:
    """Return for each depth the share of drafts in ``texts`` whose tokens are right up to that depth."""
    recipe.module.eval()
    with torch.inference_mode(), mixed(options.precision):
        batches = in_order(texts, options.batch_tokens, options.longest)
        counts = torch.stack([recipe.right(batch) for batch in batches]).sum(0).tolist()
    return tuple(count / max(counts[0], 1) for count in counts[1:])


Stepped = Sequence[tuple[torch.optim.Optimizer, float]]
"""Optimizers with their peak learning rates."""


def _restore(saved: Mapping[str, Tensor], module: nn.Module, optimizers: Stepped) -> None:
    module.load_state_dict({name.removeprefix("module."): t for name, t in saved.items() if name.startswith("module.")})
    for number, (optimizer, _) in enumerate(optimizers):
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in saved.items():
            kind, *rest = name.split(".", 3)
            if kind == "optimizer" and rest[0] == str(number):
                state.setdefault(int(rest[1]), {})[rest[2]] = tensor
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
