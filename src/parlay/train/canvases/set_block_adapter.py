"""An adapter that mask rows alone run with, so that a causal model drafts for itself and stays as it is.

Shapes: B rows, T tokens of each, H hidden, I inputs and O outputs of a product, R rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from parlay.models.lora import MASKS
from parlay.models.lora_layout import CONFIG, PRODUCTS, WEIGHTS
from parlay.system.user_cache import saved_whole
from parlay.train.canvases import masks
from parlay.train.canvases.decoders import Decoder
from parlay.train.canvases.options import SetBlockTrainOptions
from parlay.train.canvases.recipe import Slow, Stepper
from parlay.train.canvases.rows import RowBatch
from parlay.train.canvases.set_block import SetBlockRecipe
from parlay.types import ParlayError


class RowsAdapter(nn.Module):
    """Low-rank matrices beside all products of a decoder's layers, for the first places of a forward alone."""

    def __init__(self, model: Any, rank: int, draw: torch.Generator) -> None:
        super().__init__()
        self.rank = rank
        self._places = 0
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        linears = {name: each for name, each in model.model.layers.named_modules() if name.endswith(PRODUCTS)}
        if not linears:
            raise ParlayError(f"{type(model).__name__} has none of the products {', '.join(PRODUCTS)} to adapt")
        for name, linear in linears.items():
            outputs, inputs = linear.weight.shape
            key = name.replace(".", "/")  # a name of a parameter has no dots
            self.down[key] = nn.Parameter(torch.randn(rank, inputs, generator=draw) * inputs**-0.5)
            self.up[key] = nn.Parameter(torch.zeros(outputs, rank))
            linear.register_forward_hook(self._hook(key))

    def _hook(self, key: str) -> Any:
        def add(module: nn.Module, inputs: tuple[Tensor, ...], out_BTO: Tensor) -> Tensor:
            places = self._places
            if not places:
                return out_BTO
            added_BTO = inputs[0][:, :places] @ self.down[key].T @ self.up[key].T
            return torch.cat([out_BTO[:, :places] + added_BTO, out_BTO[:, places:]], 1)

        return add

    @contextmanager
    def on(self, places: int) -> Iterator[None]:
        """Let the first places of forwards run with the adapter."""
        self._places = places
        try:
            yield
        finally:
            self._places = 0

    def save(self, folder: Path, base: str) -> None:
        """Write it in PEFT's layout."""
        tensors = {}
        for key in self.down:
            module = f"base_model.model.model.layers.{key.replace('/', '.')}"
            tensors[f"{module}.lora_A.weight"] = self.down[key].detach().to(torch.bfloat16).contiguous()
            tensors[f"{module}.lora_B.weight"] = self.up[key].detach().to(torch.bfloat16).contiguous()
        said = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": self.rank,
            "target_modules": sorted({product.rpartition(".")[2] for product in PRODUCTS}),
            "bias": "none",
        }
        (folder / CONFIG).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
        with saved_whole(folder / WEIGHTS) as part:
            save_file(tensors, part, {"format": "pt"})


class MaskAdapterRecipe(SetBlockRecipe):
    """The target drafts with an adapter on rows of masks, and verifies without (UNO; gated LoRA, Samragh et al. 2025,
    arXiv:2507.11851).

    The canvases of `SetBlockRecipe`, all masked, since drafts begin so. The clean half of the same forward is the model
    as it is, and says what canvases learn. Only the adapter is trained, so the model's own text can't change.
    """

    def __init__(self, options: SetBlockTrainOptions, decoder: Decoder) -> None:
        decoder.requires_grad_(False)
        super().__init__(options, decoder, decoder)
        self._adapter = RowsAdapter(decoder.inner, options.lora, self.draw)
        decoder.add_module("adapter", self._adapter)

    def optimizer(self) -> Stepper:
        return Slow(self._adapter, self._options.rate)

    def loss(self, batch: RowBatch) -> Tensor:
        length, size = batch.ids_BT.shape[1], self._options.block
        offset = int(torch.randint(1, size + 1, (1,), generator=self.draw))
        group_T = masks.groups_of(length, size, offset)
        masked_BT = (group_T >= 0)[None].expand_as(batch.ids_BT)
        hidden_BTH = self._hidden(batch, masked_BT, group_T)
        own_BTH = hidden_BTH[:, length:].detach()
        return self.guesses(hidden_BTH[:, :length], own_BTH, batch, masked_BT, group_T)

    def _hidden(self, batch: RowBatch, masked_BT: Tensor, group_T: Tensor) -> Tensor:
        with self._adapter.on(batch.ids_BT.shape[1]):
            return super()._hidden(batch, masked_BT, group_T)

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerFast, card: str) -> None:
        """Write the adapter, and which token its rows read."""
        inner: Any = self.decoder.inner
        folder.mkdir(parents=True, exist_ok=True)
        self._adapter.save(folder, Path(inner.config._name_or_path).name)
        said = {"mask_token_id": self.decoder.mask_id, "set_block_size": self._options.block}
        (folder / MASKS).write_text(json.dumps(said) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(card, encoding="utf-8")
