"""`parlay train scone`: a small language model that adds embeddings of frequent n-grams at its input (Yu et al. 2025).

While training, a small transformer (encoder) computes the embedding of each n-gram, and is trained with the model.
After training, all embeddings are written to a table, so inference looks them up and does not run the encoder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model

from parlay.models.config import LONGEST_NGRAM
from parlay.models.lookup import NgramTable
from parlay.models.lookup_index import NgramIndex, frequent_ngrams, grams_of
from parlay.options import option
from parlay.train import lm
from parlay.train.lm_data import TRAINING, load_stream
from parlay.train.lm_model import export

_PART = 4096
"""N-grams whose embeddings are computed in one forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SconeOptions(lm.TrainOptions):
    """Options of `parlay train scone`: those of `parlay train lm`, which n-grams have embeddings, and the encoder's
    size."""

    ngrams: int = option(100_000, "how many of the training text's most frequent n-grams have embeddings", low=1)
    longest: int = option(5, "tokens of an n-gram, at most", low=2, high=LONGEST_NGRAM)
    encoder_layers: int = option(2, "layers of the transformer that makes the embeddings", low=1, high=64)


class NgramEmbedding(nn.Module):
    """Token embeddings, plus for each token the embedding of the longest frequent n-gram that ends there."""

    def __init__(self, plain: nn.Embedding, index: NgramIndex, encoder: Qwen3Model) -> None:
        super().__init__()
        self.weight = plain.weight  # which the LM head may share
        self.index, self.encoder = index, encoder
        tokens, lengths = index.tokens()
        self.tokens_FL, self.lengths_F = torch.from_numpy(tokens), torch.from_numpy(lengths)
        nn.init.zeros_(encoder.norm.weight)  # at first n-grams add nothing

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return the input ``[B, T, H]`` of the first layer for token ids."""
        embedded: Tensor = F.embedding(ids_BT, self.weight) + self.added(ids_BT)
        return embedded

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # how many n-grams a batch has differs
    def added(self, ids_BT: Tensor) -> Tensor:
        """Return the n-grams' part of the input, ``[B, T, H]``; a repeated n-gram is computed once."""
        found = self.index.find(grams_of(ids_BT.numpy(), self.index.longest))
        own, places = np.unique(found, return_inverse=True)
        none = int(own[0] < 0)
        made_UH = self.embeddings(torch.from_numpy(own[none:]))
        made_UH = torch.cat((made_UH.new_zeros(none, made_UH.shape[1]), made_UH))
        return made_UH[torch.from_numpy(places)].view(*ids_BT.shape, -1)

    def embeddings(self, grams_U: Tensor) -> Tensor:
        """Return the embeddings ``[U, H]`` of U n-grams, given by number: the encoder's outputs for last tokens."""
        lengths_U = self.lengths_F[grams_U]
        ids_UL = self.tokens_FL[grams_U, : int(lengths_U.max()) if len(grams_U) else 1]
        states_ULH = self.encoder(input_ids=ids_UL).last_hidden_state
        made_UH: Tensor = states_ULH[torch.arange(len(grams_U)), lengths_U - 1].float()
        return made_UH


class SconeTrainer(lm.Trainer):
    """A run whose model has an `NgramEmbedding` in place of its embedding."""

    options: SconeOptions

    @property
    def kind(self) -> str:
        return f"scone-{self.options.encoder_layers}-{self.options.shape}"

    def make_model(self, config: Qwen3Config) -> Qwen3ForCausalLM:
        model = super().make_model(config)
        options, stream = self.options, load_stream(self.options.work, TRAINING, self.options.context)
        index = frequent_ngrams(stream.tokens, config.vocab_size, longest=options.longest, most=options.ngrams)
        if not len(index):
            raise ValueError("no n-gram stands twice in the training text: more text is needed")
        lm.log(f"{len(index):,} n-grams of 2 to {options.longest} tokens")
        sizes = {"num_hidden_layers": options.encoder_layers, "layer_types": None}
        encoder = Qwen3Model(Qwen3Config.from_dict({**config.to_dict(), **sizes}))
        model.model.embed_tokens = NgramEmbedding(model.model.embed_tokens, index, encoder)
        return model

    def write(self, record: dict[str, Any]) -> None:
        """Write the checkpoint, and the table of its n-grams' embeddings."""
        out, embedding = self.options.out, self.model.model.embed_tokens
        assert isinstance(embedding, NgramEmbedding)
        export(self.model, self.tokenizer, out, record)
        with torch.inference_mode():
            grams = torch.arange(len(embedding.index))
            parts = [embedding.embeddings(grams[begin : begin + _PART]) for begin in range(0, len(grams), _PART)]
        NgramTable.write(out, embedding.index, torch.cat(parts))


def train(options: SconeOptions) -> Path:
    """Train a model with n-gram embeddings, and return the folder of its checkpoint."""
    return lm.train(options, lambda _: SconeTrainer(options))
