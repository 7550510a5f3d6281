"""DiffusionGemma through transformers: texts are those of transformers' own loop that draws the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion, Gemma4VisionConfig
from transformers.models.diffusion_gemma import generation_diffusion_gemma as theirs

from parlay import LLM, SamplingParams
from parlay.sampling.noise import Purpose, bits, gumbel, stream
from parlay.testing.toy_tokenizers import toy_tokenizer
from parlay.types import NoiseKey, ParlayError

VOCAB, CANVAS, SEED = 64, 8, 3
TEXT = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(0)).tolist()
PROMPTS = ([5], TEXT[:7], TEXT[:23])
"""The last one is longer than the window of 12."""


def config() -> DiffusionGemmaConfig:
    text = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16,
        "max_position_embeddings": 256, "sliding_window": 12, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 16, "layer_types": ["sliding_attention", "full_attention"], "eos_token_id": 2,
        "initializer_range": 0.6, "use_bidirectional_attention": "vision",
    }  # fmt: skip
    vision = Gemma4VisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8,
        num_key_value_heads=2, global_head_dim=8,
    )  # fmt: skip
    return DiffusionGemmaConfig(text_config=text, vision_config=vision, canvas_length=CANVAS, image_token_id=VOCAB - 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("diffusion-gemma")
    torch.manual_seed(0)
    DiffusionGemmaForBlockDiffusion(config()).save_pretrained(made)
    toy_tokenizer(VOCAB).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), max_num_seqs=4, max_num_batched_tokens=24) as made:
        yield made


class Draws:
    """What transformers' loop draws for one prompt: Parlay's numbers for seed, position and forward."""

    def __init__(self, prompt: list[int], temperature: float) -> None:
        self._first, self._temperature, self._forwards, self._renoises = len(prompt) - CANVAS, temperature, 0, False

    def initialize(self, sampler: object, batch_size: int, device: torch.device) -> Tensor:
        """A whole canvas of noise."""
        if not self._renoises:
            self._first, self._forwards = self._first + CANVAS, 0
        positions = range(self._first, self._first + CANVAS)
        drawn = [stream(NoiseKey(SEED), at, Purpose.NOISE, self._forwards) % VOCAB for at in positions]
        return torch.tensor([drawn])

    def renoise(self, sampler: theirs.EntropyBoundSampler, canvas: Tensor, step: object) -> Tensor:
        """The next forward's canvas."""
        self._forwards, self._renoises = self._forwards + 1, True
        renoised = torch.where(sampler.accepted_token_mask, canvas, self.initialize(sampler, 1, canvas.device))
        self._renoises = False
        return renoised

    def multinomial(self, probs_PV: Tensor, num_samples: int) -> Tensor:
        """The likeliest tokens, or those of the shared noise of each position."""
        if self._temperature == 0:
            return probs_PV.argmax(-1, keepdim=True)
        streams = [stream(NoiseKey(SEED), self._first + place) for place in range(CANVAS)]
        noise_PV = gumbel(bits(streams, torch.arange(VOCAB)))
        return (probs_PV.double().log() + noise_PV).argmax(-1, keepdim=True)


def expected(
    model: DiffusionGemmaForBlockDiffusion, prompt: list[int], temperature: float, length: int, **options: float
) -> list[int]:
    draws = Draws(prompt, temperature)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theirs.EntropyBoundSampler, "initialize_canvas", draws_of(draws.initialize))
        patch.setattr(theirs.EntropyBoundSampler, "renoise_canvas", draws_of(draws.renoise))
        patch.setattr(theirs.torch, "multinomial", draws.multinomial)
        bound = theirs.EntropyBoundSamplerConfig(entropy_bound=options.pop("bound", 0.1))
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=length, sampler_config=bound, eos_token_id=None, **options
        )
    return out.sequences[0, len(prompt) :].tolist()[:length]


def draws_of(call):  # type: ignore[no-untyped-def]
    """As a function, which becomes a method when a class has it."""
    return lambda *given, **named: call(*given, **named)


CASES = (
    {"max_denoising_steps": 5},
    {"max_denoising_steps": 12, "bound": 6.0, "confidence_threshold": 3.0},
    {"max_denoising_steps": 9, "t_min": 0.01, "t_max": 0.05, "stability_threshold": 2, "confidence_threshold": 2.0},
)


@pytest.mark.parametrize(("options", "temperature"), [*zip(CASES, (0.0, 1.0, 0.0), strict=True)], ids=str)
def test_texts_are_those_of_transformers(llm: LLM, folder: Path, options: dict[str, float], temperature: float) -> None:
    """All prompts in one batch whose rows are few, so that prompts are read in parts and canvases wait for others."""
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(folder).eval()
    params = SamplingParams(temperature=temperature, seed=SEED, max_tokens=19, ignore_eos=True)
    spec = ",".join(["denoise:selector=renoise", *(f"{name}={value}" for name, value in options.items())])
    outputs = llm.generate(list(PROMPTS), params, strategy=spec)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == expected(model, list(prompt), temperature, 19, **options)
    llm.runner.check()


def test_the_usual_strategy_renoises_and_what_else_it_can_not(llm: LLM, folder: Path) -> None:
    params = SamplingParams(temperature=0, seed=SEED, max_tokens=5, ignore_eos=True)
    usual, named = (
        llm.generate([[5]], params, strategy=each)[0].outputs[0] for each in (None, "denoise:selector=renoise")
    )
    assert usual.token_ids == named.token_ids
    assert (len(usual.token_ids), str(usual.metrics.exactness)) == (5, "lossy")
    with pytest.raises(ValueError, match="strategy none writes token by token"):
        llm.generate([[5]], params, strategy="none")
    with pytest.raises(ValueError, match="choose selector=renoise"):
        llm.generate([[5]], params, strategy="denoise:selector=threshold")
    with pytest.raises(ParlayError, match="renoise fills whole canvases; remove block"):
        llm.generate([[5]], params, strategy="denoise:selector=renoise,block=4")


def test_canvases_end_where_the_context_does_and_fit_a_step(llm: LLM) -> None:
    params = SamplingParams(temperature=0, seed=SEED, max_tokens=50, ignore_eos=True)
    strategy = "denoise:selector=renoise,max_denoising_steps=2"
    (sample,) = llm.generate([[5] * 244], params, strategy=strategy)[0].outputs
    assert (len(sample.token_ids), sample.finish_reason, sample.metrics.steps) == (12, "length", 4)
    torch.manual_seed(0)
    wide = config()
    wide.canvas_length, wide.text_config.max_position_embeddings = 300, 400
    with LLM(DiffusionGemmaForBlockDiffusion(wide), tokenizer=toy_tokenizer(VOCAB)) as large:  # noqa: SIM117
        with pytest.raises(ValueError, match="fills 300 places at once, but a step takes 256"):
            large.generate([[5]], params)


def test_a_loaded_model_runs_too_and_a_bidirectional_text_is_refused() -> None:
    torch.manual_seed(0)
    model = DiffusionGemmaForBlockDiffusion(config())
    model.config.text_config.use_bidirectional_attention = "all"
    with pytest.raises(ParlayError, match="rows of its text see those after them"):
        LLM(model, tokenizer=toy_tokenizer(VOCAB))
