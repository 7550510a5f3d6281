"""The processes that train one module: this process alone, or several that torchrun started.

Each process trains on its own share of the batches. Gradients, losses and times are averaged over all processes, so all
take the same steps and stop together. Only the first process writes files and prints.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from parlay.train.data.batches import TrainingBatch
from parlay.train.recipes.recipe import Recipe
from parlay.types import ParlayError

if TYPE_CHECKING:
    from accelerate import Accelerator

LossOf = Callable[[TrainingBatch], Tensor]


class Processes(Protocol):
    """Rank and number of the processes, and what they compute together."""

    rank: int
    count: int

    def loss_of(self, recipe: Recipe) -> LossOf:
        """Return the recipe's loss; its backward pass gives every process the averaged gradients."""
        ...

    def mean(self, value: float) -> float: ...

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """Run the block in the first process before the others run it, so that they find the files it wrote."""
        ...


class Alone:
    """Only this process."""

    rank, count = 0, 1

    def loss_of(self, recipe: Recipe) -> LossOf:
        return recipe.loss

    def mean(self, value: float) -> float:
        return value

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        yield


class _Loss(nn.Module):
    """A recipe's loss as the forward of a module with the trained weights, because DDP averages gradients only then."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.trained = recipe.module
        self._loss = recipe.loss

    def forward(self, batch: TrainingBatch) -> Tensor:
        return self._loss(batch)


class Together:
    """Several processes on CPUs, joined by accelerate."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.rank, self.count = accelerator.process_index, accelerator.num_processes

    def loss_of(self, recipe: Recipe) -> LossOf:
        loss: LossOf = self._accelerator.prepare(_Loss(recipe))
        return loss

    def mean(self, value: float) -> float:
        return float(self._accelerator.reduce(torch.tensor(value, dtype=torch.float64), "mean"))

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        with self._accelerator.main_process_first():
            yield


def processes() -> Processes:
    """Return the processes that torchrun started, else this one alone.

    Raises ParlayError if there are several and accelerate is missing.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Alone()
    try:
        from accelerate import Accelerator, DistributedDataParallelKwargs  # here, because one process needs none
    except ModuleNotFoundError as error:
        raise ParlayError("training in several processes needs accelerate: pip install 'parlay[accelerate]'") from error
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)  # what a draft vocabulary leaves out, say
    return Together(Accelerator(cpu=True, kwargs_handlers=[unused]))
