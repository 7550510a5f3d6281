"""Trains an adapter that only mask rows use, so that a causal model drafts for itself and its text stays the same.

Shapes: B rows, T tokens of each, G canvases, M mask rows, S = T + M; P mask rows of all rows, D depths; H hidden, O
outputs of a product, W tokens that the loss covers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from parlay.models.lora import MASKS
from parlay.models.lora_layout import CONFIG, PRODUCTS, WEIGHTS
from parlay.system.user_cache import saved_whole
from parlay.train.canvases.decoders import Decoder, set_block_config
from parlay.train.canvases.options import SetBlockTrainOptions
from parlay.train.canvases.recipe import CanvasRecipe, Slow, Stepper
from parlay.train.canvases.rows import RowBatch, anchors
from parlay.train.optimizers import halves
from parlay.types import ParlayError

_DECAY = 0.8
"""The weight of each draft relative to the draft before it."""


class RowsAdapter(nn.Module):
    """Low-rank matrices added to all products of a decoder's layers (LoRA), which apply only while the adapter is
    on."""

    def __init__(self, model: Any, rank: int, draw: torch.Generator) -> None:
        super().__init__()
        self.rank = rank
        self._is_on = False
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
        def add(module: nn.Module, inputs: tuple[Tensor, ...], out_BMO: Tensor) -> Tensor:
            return out_BMO + inputs[0] @ self.down[key].T @ self.up[key].T if self._is_on else out_BMO

        return add

    @contextmanager
    def on(self) -> Iterator[None]:
        """Turn the adapter on for the forwards in this block."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def save(self, folder: Path, base: str) -> None:
        """Write the adapter in PEFT's layout; ``base`` is the base model's name."""
        tensors = {}
        for key in self.down:
            module = f"base_model.model.model.layers.{key.replace('/', '.')}"
            tensors[f"{module}.lora_A.weight"] = self.down[key].detach().to(torch.bfloat16).contiguous()
            tensors[f"{module}.lora_B.weight"] = self.up[key].detach().to(torch.bfloat16).contiguous()
        fields = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": self.rank,
            "target_modules": sorted({product.rpartition(".")[2] for product in PRODUCTS}),
            "bias": "none",
        }
        (folder / CONFIG).write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
        with saved_whole(folder / WEIGHTS) as part:
            save_file(tensors, part, {"format": "pt"})


class Guessed(NamedTuple):
    """P mask rows: their states ``guess_PH``, and the states ``own_PH`` of the text at the same places, which are the
    labels.

    ``token_P`` is the text's next token there. ``depth_P`` is the place within the canvas, from 0.
    """

    guess_PH: Tensor
    own_PH: Tensor
    token_P: Tensor
    depth_P: Tensor


class MaskAdapterRecipe(CanvasRecipe):
    """The target drafts with an adapter on mask rows, and verifies without it (gated LoRA, Samragh et al. 2025,
    arXiv:2507.11851; UNO).

    The unchanged model reads each row once, without gradients. Then ``groups`` canvases of masks begin at random places
    of its answer; each attends to the text before it and to itself. So one reading serves many canvases, and only mask
    rows need gradients. They are trained on the model's own distributions on the text. Texts that the model wrote
    greedily work best, since there the token after an unknown token can be predicted. Deeper drafts weigh less, because
    they count only if all drafts before them are accepted. Only the adapter is trained, so the model's text does not
    change.
    """

    def __init__(self, options: SetBlockTrainOptions, decoder: Decoder, common_W: Tensor | None = None) -> None:
        """``common_W``: the tokens that the loss covers, ascending; None: all."""
        decoder.requires_grad_(False)
        super().__init__(decoder, options.seed)
        self._options, self._common_W = options, common_W
        model: Any = decoder.inner
        self._adapter = RowsAdapter(model, options.lora, self.draw)
        decoder.add_module("adapter", self._adapter)
        self._head_WH: Tensor = (
            model.lm_head.weight.detach() if common_W is None else model.lm_head.weight[common_W].detach()
        )
        if halves(options.precision):  # once, and not in each forward
            self._head_WH = self._head_WH.bfloat16()
            for linear in model.model.layers.modules():
                if isinstance(linear, nn.Linear):
                    linear.to(torch.bfloat16)

    def optimizer(self) -> Stepper:
        return Slow(self._adapter, self._options.rate)

    def loss(self, batch: RowBatch) -> Tensor:
        found, options = self._guessed(batch, anchors(batch, self._options.groups, self.draw)), self._options
        guess_PW, own_PW = (self._logits(each) for each in (found.guess_PH, found.own_PH))
        weight_P = _DECAY**found.depth_P
        weight_P = weight_P / weight_P.sum().clamp(min=1)
        own_PW = own_PW.log_softmax(-1)
        guess_PW = guess_PW.log_softmax(-1)
        total = options.keep * ((own_PW.exp() * (own_PW - guess_PW)).sum(-1) * weight_P).sum()
        if options.text_weight:
            known_P, label_P = self._labels(found.token_P)
            chosen_P = guess_PW.gather(1, label_P[:, None])[:, 0]
            total = total - options.text_weight * (chosen_P * weight_P * known_P).sum()
        return total

    def _logits(self, hidden_PH: Tensor) -> Tensor:
        return F.linear(hidden_PH.to(self._head_WH.dtype), self._head_WH).float()

    def _labels(self, token_P: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether the loss covers each token, and the token's index in ``common_W``."""
        if self._common_W is None:
            return torch.ones_like(token_P), token_P
        label_P = torch.searchsorted(self._common_W, token_P).clamp(max=len(self._common_W) - 1)
        return self._common_W[label_P] == token_P, label_P

    def _guessed(self, batch: RowBatch, anchors_BG: Tensor) -> Guessed:
        """Run the text, and canvases that begin at ``anchors_BG``; return the mask rows whose next place is in the
        text."""
        size, length = self._options.block, batch.ids_BT.shape[1]
        with torch.no_grad():
            text_BTH, cache = self.decoder.read(batch.ids_BT)
        place_BM = (anchors_BG[:, :, None] + torch.arange(size)).flatten(1)
        begin_BM, group_M = anchors_BG.repeat_interleave(size, 1), torch.arange(place_BM.shape[1]) // size
        seen_BMT = torch.arange(length) < begin_BM[:, :, None]
        own_BMM = (group_M[:, None] == group_M).expand(len(place_BM), -1, -1)
        masks_BM = torch.full_like(place_BM, self.decoder.mask_id)
        with self._adapter.on():
            guess_BMH = self.decoder.further(masks_BM, place_BM, torch.cat([seen_BMT, own_BMM], 2), cache)
        wanted_BM = place_BM + 1 < batch.length_B[:, None]
        rows_P, place_P = torch.arange(len(place_BM))[:, None].expand_as(place_BM)[wanted_BM], place_BM[wanted_BM]
        depth_P = (torch.arange(place_BM.shape[1]) % size).expand_as(place_BM)[wanted_BM]
        own_PH, token_P = text_BTH[rows_P, place_P], batch.ids_BT[rows_P, place_P + 1]
        return Guessed(guess_BMH[wanted_BM], own_PH, token_P, depth_P)

    def config(self) -> Mapping[str, Any]:
        return set_block_config(self.decoder.mask_id, self._options.block)

    def measure(self, batches: Sequence[RowBatch]) -> dict[str, float]:
        """Measure perplexity on texts, and per depth how often the text's token is the first draft, or among the first
        three."""
        size, nats = self._options.block, 0.0
        right_DK, counts_D = torch.zeros(size, 2), torch.zeros(size)
        self.draw.manual_seed(0)
        for batch in batches:
            hidden_BTH, _ = self.decoder.read(batch.ids_BT)
            nats += float(self.text_loss(hidden_BTH, batch)) / len(batches)
            found = self._guessed(batch, anchors(batch, self._options.groups, self.draw))
            hit_PK = self.decoder.head(found.guess_PH).topk(3, -1).indices == found.token_P[:, None]
            right_DK.index_add_(0, found.depth_P, torch.stack([hit_PK[:, 0], hit_PK.any(1)], 1).float())
            counts_D.index_add_(0, found.depth_P, torch.ones(len(hit_PK)))
        shares = (right_DK / counts_D.clamp(min=1)[:, None]).tolist()
        named = [(f"guess {depth}", f"guess {depth} of three") for depth in range(1, size + 1)]
        right = {name: share for each in zip(named, shares, strict=True) for name, share in zip(*each, strict=True)}
        return {"perplexity": math.exp(nats), **right}

    def save(self, folder: Path, tokenizer: PreTrainedTokenizerFast, card: str) -> None:
        """Write the adapter, the mask token's id, and the card."""
        inner: Any = self.decoder.inner
        folder.mkdir(parents=True, exist_ok=True)
        self._adapter.save(folder, Path(inner.config._name_or_path).name)
        fields = {"mask_token_id": self.decoder.mask_id, "set_block_size": self._options.block}
        (folder / MASKS).write_text(json.dumps(fields) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(card, encoding="utf-8")
