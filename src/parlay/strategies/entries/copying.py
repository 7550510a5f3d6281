"""Strategies that copy from the prompt, the output and references, or count n-grams in them."""

from __future__ import annotations

from functools import partial

from parlay.drafters.copying import aggressive, prediction, prompt_lookup, reference_copy
from parlay.drafters.counting import adaptive_ngram, ngram_caches
from parlay.strategies.entry import StrategyEntry

_copy = partial(StrategyEntry, family="copy")

ENTRIES = (
    _copy(
        name=prompt_lookup.SOURCE,
        replayable=True,
        training="none",
        needs="nothing",
        summary="Copies what followed the longest earlier match of the latest tokens, in prompt, output or references.",
        when="the answer repeats the prompt, a reference or itself: edits, quotes, code, JSON",
        reference="Saxena 2023, prompt lookup decoding, github.com/apoorvumang/prompt-lookup-decoding",
        options=prompt_lookup.PromptLookupOptions,
        k=31,
        factory="parlay.drafters.copying.prompt_lookup:PromptLookup",
        toys=("", "min_ngram=1,max_ngram=2,pick=leftmost"),
        vllm=("ngram", "ngram_gpu"),
    ),
    _copy(
        name=ngram_caches.SOURCE,
        replayable=True,
        training="none",
        needs="nothing",
        summary="Drafts from three n-gram caches, each with its own thresholds: this request, past requests, a corpus.",
        when="many requests are alike, and drafts need not be trees",
        reference="llama.cpp, example `lookup`, github.com/ggml-org/llama.cpp",
        options=ngram_caches.NgramCachesOptions,
        factory="parlay.drafters.counting.ngram_caches:NgramCaches",
    ),
    _copy(
        name=reference_copy.SOURCE,
        replayable=True,
        training="none",
        needs="requests with references",
        summary="Finds the output's last tokens in the request's references, and copies what follows them there.",
        when="a text is given that the answer will repeat: retrieved documents, predicted outputs",
        reference="Yang et al. 2023 (LLMA), arXiv:2304.04487",
        options=reference_copy.ReferenceCopyOptions,
        k=19,
        factory="parlay.drafters.copying.reference_copy:ReferenceCopy",
        toys=("", "resync=true"),
    ),
    _copy(
        name=prediction.SOURCE,
        replayable=True,
        predicts=True,
        training="none",
        needs="requests with a prediction",
        summary="Copies from a predicted output, and finds the place again after changes; else `fallback` drafts.",
        when="most of the answer is known: a file or text that is edited",
        reference="OpenAI, Predicted Outputs, platform.openai.com/docs/guides/predicted-outputs",
        options=prediction.PredictionOptions,
        k=63,
        factory="parlay.drafters.copying.prediction:PredictedOutput",
        toys=("", "fallback="),
    ),
    _copy(
        name=aggressive.SOURCE,
        replayable=True,
        training="none",
        needs="nothing; best with the source as a reference",
        summary="Assumes that the output repeats the references or the prompt, and drafts all that is left of them.",
        when="the answer is the prompt with few changes: corrections, rewriting",
        reference="Sun et al. 2021 and Ge et al. 2022 (input-guided aggressive decoding), arXiv:2205.10350",
        options=aggressive.AggressiveOptions,
        k=63,
        factory="parlay.drafters.copying.aggressive:Aggressive",
    ),
    _copy(
        name=adaptive_ngram.SOURCE,
        replayable=True,
        training="none",
        needs="nothing",
        summary="Drafts by an n-gram model of prompt and output, with back-off to shorter n-grams.",
        when="outputs are long, of one style, and repeat nothing",
        reference="Ou et al. 2024 (ANPD), arXiv:2404.08698",
        options=adaptive_ngram.AdaptiveNgramOptions,
        k=10,
        factory="parlay.drafters.counting.adaptive_ngram:AdaptiveNgram",
    ),
)
