"""The work that the benchmark of looked-up layers counts, and the rows of its page."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.ngram_layers import Measured, lines, work
from parlay.models.config import DecoderConfig, NgramLayers

PLAIN = DecoderConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=1000,
    hidden_size=100,
    intermediate_size=300,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=50,
    rms_norm_eps=1e-6,
    max_context=128,
    tie_embeddings=True,
)
LAYER, HEAD = (200 * 100 + 2 * 100 * 100 + 100 * 200 + 3 * 100 * 300) / 1e6, 0.1


def test_work_is_that_of_the_layers_which_run() -> None:
    """Where its state is there only the last layers run; else the first ones run for each token of the n-gram, too."""
    looked_up = replace(PLAIN, ngram_layers=NgramLayers(2, 3))
    assert round(work(PLAIN, 0), 6) == round(5 * LAYER + HEAD, 6)
    assert round(work(looked_up, 0), 6) == round(3 * LAYER + HEAD, 6)
    assert round(work(looked_up, 0.25), 6) == round((3 + 0.25 * 3 * 2) * LAYER + HEAD, 6)


def test_rows_of_the_page() -> None:
    plain = Measured("plain", 0, 80.04, (0.65, 0.65, 0.65), None, None, {"forward": 61e-6})
    looked_up = Measured("looked up", 0, 75.0, (0.65, 0.9, 0.8), 0.7, 0.84, {"forward": 80e-6, "computed": 0.0002})
    assert list(lines([plain, looked_up])) == [
        ("plain", "0", "80.0", "-", "-", "0.65", "0.65", "0.65", "61 µs", "-"),
        ("looked up", "0", "75.0", "70%", "84%", "0.65", "0.90", "0.80", "80 µs", "200 µs"),
    ]
