"""The families that the native decoder runs, by the names that config.json and GGUF files give them."""

from __future__ import annotations

from collections.abc import Mapping

from parlay.models.families.diffusion import DIFFUSION
from parlay.models.families.family import REPLAYED, Family
from parlay.models.families.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA3_IMAGES
from parlay.models.families.gemma4 import GEMMA4, GEMMA4_IMAGES
from parlay.models.families.glm import GLM, GLM4, GLM4_MOE
from parlay.models.families.gpt_oss import GPT_OSS
from parlay.models.families.granite import GRANITE, GRANITE4, GRANITE_MOE, GRANITE_MOE_SHARED, SOME_MAMBA
from parlay.models.families.llama import LLAMA, MISTRAL, MISTRAL_IMAGES, MIXTRAL
from parlay.models.families.olmo import OLMO2, OLMO3
from parlay.models.families.others import ERNIE, EXAONE4, SEED
from parlay.models.families.phi import PHI3
from parlay.models.families.qwen import DEEP_SHALLOW, NGRAM_LAYERS, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, SCONE
from parlay.models.families.smollm import SMOLLM3

CAUSAL = (
    *(LLAMA, MISTRAL, MISTRAL_IMAGES, MIXTRAL, QWEN2, QWEN3, QWEN2_MOE, QWEN3_MOE),
    *(GEMMA, GEMMA2, GEMMA3, GEMMA3_IMAGES, GEMMA4, GEMMA4_IMAGES, PHI3, OLMO2, OLMO3, SMOLLM3),
    *(GRANITE, GRANITE_MOE, GRANITE_MOE_SHARED, GRANITE4, GPT_OSS, GLM, GLM4, GLM4_MOE, ERNIE, SEED, EXAONE4),
)
"""Autoregressive families."""
OF_TABLES = (SCONE, NGRAM_LAYERS, DEEP_SHALLOW)
"""Parlay's own families: two look up part of the computation in tables, one runs only its last layers for answers."""
FAMILIES: Mapping[str, Family] = {family.architecture: family for family in (*CAUSAL, *OF_TABLES, *DIFFUSION)}
"""Families by architecture, as named in config.json."""
_MAMBA = "its layers are recurrent (Mamba): no drafts, because it computes several rows at once wrongly"
_DELTA = f"some of its layers are recurrent (gated delta): {REPLAYED}"
_OTHER_NORMS = "its norms subtract the mean"
ELSEWHERE: Mapping[str, str] = {
    "DiffusionGemmaForBlockDiffusion": "an encoder reads its text, and a decoder fills canvases that begin as noise",
    **dict.fromkeys(("MambaForCausalLM", "FalconMambaForCausalLM"), _MAMBA),
    "JambaForCausalLM": f"some of {_MAMBA}",
    "Mamba2ForCausalLM": f"its layers are recurrent (Mamba): {REPLAYED}",
    "Zamba2ForCausalLM": "some of its layers are recurrent (Mamba); its forward with a cache failed when it was tried",
    **dict.fromkeys(("BambaForCausalLM", "NemotronHForCausalLM", "FalconH1ForCausalLM"), SOME_MAMBA),
    **dict.fromkeys(("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"), _DELTA),
    **dict.fromkeys(("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"), _DELTA),
    "RecurrentGemmaForCausalLM": "its layers hold the state of a single text, so Parlay refuses it there, too",
    "Lfm2ForCausalLM": f"some of its layers are short convolutions: {REPLAYED}",
    "Gemma3nForCausalLM": "it has several hidden states per token (AltUp); drafts are chains",
    **dict.fromkeys(("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"), "its keys are compressed (latent attention)"),
    "Llama4ForCausalLM": "its attention is in chunks",
    **dict.fromkeys(("CohereForCausalLM", "Cohere2ForCausalLM", "StableLmForCausalLM"), _OTHER_NORMS),
    **dict.fromkeys(("GPT2LMHeadModel", "GPTNeoXForCausalLM", "PhiForCausalLM", "OPTForCausalLM"), _OTHER_NORMS),
}
"""Families that transformers runs through the adapter, and the reason why Parlay's decoder doesn't."""
GGUF_FAMILIES: Mapping[str, Family] = {family.gguf.name: family for family in FAMILIES.values() if family.gguf}
"""Families by ``general.architecture`` of GGUF files."""
