"""Random LoRA adapters in PEFT's layout, for tests and for measuring what adapters cost."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from parlay.models.config import DecoderConfig
from parlay.models.lora_layout import CONFIG, PRODUCTS, WEIGHTS
from parlay.models.weights.shapes import weight_shapes


def save_adapter(
    folder: Path,
    config: DecoderConfig,
    *,
    rank: int = 4,
    alpha: float = 8,
    products: Sequence[str] = PRODUCTS,
    seed: int = 0,
    changes: Mapping[str, object] | None = None,
) -> Path:
    """Write an adapter for these products of all layers into ``folder``; ``changes`` override its config."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in weight_shapes(config).items():
        module = name.removesuffix(".weight")
        if not module.endswith(tuple(products)):
            continue
        outputs, inputs = shape
        down = torch.randn(rank, inputs, generator=draw) * inputs**-0.5
        up = torch.randn(outputs, rank, generator=draw) * rank**-0.5 * 0.5
        tensors[f"base_model.model.{module}.lora_A.weight"] = down
        tensors[f"base_model.model.{module}.lora_B.weight"] = up
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "toy",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({product.rpartition(".")[2] for product in products}),
        "bias": "none",
        **(changes or {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(fields), encoding="utf-8")
    return folder
