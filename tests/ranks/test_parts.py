"""A model cut into parts: what shares give adds up to what the whole gives, and blocks of files stay whole."""

from __future__ import annotations

import dataclasses

import torch

from parlay.models.config import DecoderConfig
from parlay.models.weights.dequantize import dense
from parlay.models.weights.formats import Format
from parlay.models.weights.parts import divide, share, stage
from parlay.models.weights.shapes import weight_shapes
from parlay.models.weights.stored import StoredTensor

CONFIG = DecoderConfig(
    architecture="LlamaForCausalLM",
    vocab_size=16,
    hidden_size=64,
    intermediate_size=160,
    num_layers=4,
    num_heads=6,
    num_kv_heads=3,
    head_dim=32,
    rms_norm_eps=1e-6,
    max_context=64,
)


def numbers() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw) for name, shape in weight_shapes(CONFIG).items()}


def test_uneven_counts_are_divided_whole() -> None:
    assert divide(3, 2) == [range(1), range(1, 3)]
    assert [len(part) for part in divide(9, 4)] == [2, 2, 2, 3]


def test_shares_of_key_heads_and_units_are_whole_and_add_up() -> None:
    """Three key heads on two ranks: one and two. A product over inputs is the sum of the shares' products."""
    weights = numbers()
    shares = [share(CONFIG, weights, part, 2) for part in range(2)]
    assert [sizes.num_kv_heads for sizes, _ in shares] == [1, 2]
    assert [sizes.num_heads for sizes, _ in shares] == [2, 4]
    units = [sizes.intermediate_size for sizes, _ in shares]
    assert sum(units) == 160
    assert units[0] > units[1] > 0  # the first has fewer heads, and a small LM head
    assert all(count % 32 == 0 for count in units)
    for sizes, cut in shares:
        assert {name: tuple(weight.shape) for name, weight in cut.items()} == weight_shapes(sizes)
    name, x = "model.layers.1.mlp.down_proj.weight", torch.randn(160)
    whole, parts = weights[name] @ x, x.split(units)
    added = sum(torch.as_tensor(cut[name]) @ own for (_, cut), own in zip(shares, parts, strict=True))
    torch.testing.assert_close(added, whole)


def test_the_lm_head_counts_as_work_of_the_first_share() -> None:
    """Where it is large, the first share has fewer units, and one block at least."""
    for vocab, least in ((1000, 32), (100_000, 32)):
        config = dataclasses.replace(CONFIG, vocab_size=vocab)
        first, last = (share(config, {}, part, 2)[0].intermediate_size for part in range(2))
        assert least <= first < last
        assert first + last == 160


def test_blocks_of_a_file_are_cut_between_each_other() -> None:
    """The numbers of shares are the file's own, and stay in its blocks."""
    draw = torch.Generator().manual_seed(1)
    weights = {
        name: StoredTensor(
            Format.Q4_1,
            shape,
            torch.randint(0, 32, (shape[0], Format.Q4_1.row_bytes(shape[1])), dtype=torch.uint8, generator=draw),
        )
        if len(shape) == 2
        else torch.ones(shape)
        for name, shape in weight_shapes(CONFIG).items()
    }
    for kind, dim in (("mlp.down_proj", 1), ("self_attn.o_proj", 1), ("mlp.up_proj", 0), ("self_attn.k_proj", 0)):
        name = f"model.layers.2.{kind}.weight"
        whole = weights[name]
        parts = [share(CONFIG, weights, part, 2)[1][name] for part in range(2)]
        assert all(isinstance(part, StoredTensor) and part.format is Format.Q4_1 for part in parts)
        joined = torch.cat([dense(part) for part in parts if isinstance(part, StoredTensor)], dim)
        assert isinstance(whole, StoredTensor)
        assert torch.equal(joined, dense(whole))


def test_reordered_rows_stay_with_their_heads() -> None:
    """Files in llama.cpp's order of rows: a share reads the same rows as the whole."""
    order = torch.arange(96).reshape(-1, 16, 2).transpose(1, 2).reshape(96)
    name = "model.layers.0.self_attn.k_proj.weight"
    data = torch.randint(0, 32, (96, Format.Q8_0.row_bytes(64)), dtype=torch.uint8)
    whole = StoredTensor(Format.Q8_0, (96, 64), data, order=order)
    parts = [share(CONFIG, {**numbers(), name: whole}, part, 3)[1][name] for part in range(3)]
    assert torch.equal(torch.cat([part.rows for part in parts if isinstance(part, StoredTensor)]), whole.rows)


def test_stages_have_their_layers_under_new_numbers() -> None:
    """The first stage keeps embedding and LM head, the others have one row of zeros in their place."""
    weights = numbers()
    (first, head), (last, tail) = (stage(CONFIG, weights, layers) for layers in (range(1), range(1, 4)))
    assert (first.num_layers, last.num_layers, last.vocab_size) == (1, 3, 1)
    assert "lm_head.weight" in head
    assert tuple(tail["model.embed_tokens.weight"].shape) == (1, 64)
    name = "self_attn.q_proj.weight"
    assert tail[f"model.layers.2.{name}"] is weights[f"model.layers.3.{name}"]
    assert weight_shapes(dataclasses.replace(last, tie_embeddings=True)).keys() == tail.keys()
