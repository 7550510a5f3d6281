"""Strategies that copy from prompt, output and references, or count what followed what in them."""

from __future__ import annotations

from parlay.drafters.entries import Entry, Parameter, budget
from parlay.types import Exactness

ENTRIES = (
    Entry(
        name="prompt-lookup",
        family="copy",
        exactness=Exactness.BITS,
        training="none",
        needs="nothing",
        summary="Copies what followed the longest earlier match of the latest tokens, in prompt, output or references.",
        when="the answer repeats the prompt, a reference or itself: edits, quotes, code, JSON; the default",
        reference="Saxena 2023, prompt lookup decoding, github.com/apoorvumang/prompt-lookup-decoding",
        parameters={
            "max_ngram": Parameter(int, 1 << 20, "matches longer than this count as this long", low=1, high=1 << 20),
            "min_ngram": Parameter(int, 1, "fewest tokens that must match", low=1, high=256),
            "pick": Parameter(str, "recent", "which occurrence to copy from", choices=("recent", "leftmost")),
            **budget(31),
        },
        factory="parlay.drafters.copying.prompt_lookup:PromptLookup",
        toys=("", "min_ngram=1,max_ngram=2,pick=leftmost"),
    ),
    Entry(
        name="lookup-decoding",
        family="copy",
        exactness=Exactness.BITS,
        training="none",
        needs="nothing",
        summary="Three n-gram caches (this request, past requests, a corpus) and thresholds for what each may draft.",
        when="many requests look alike, and chains are enough",
        reference="llama.cpp, example `lookup`, github.com/ggml-org/llama.cpp",
        parameters={
            "static": Parameter(str, "", "a corpus's bigrams (parlay.drafters.counting.bigram_file); empty: none"),
            "remember": Parameter(int, 200_000, "tokens of past requests that are kept", low=0, high=10_000_000),
            **budget(16),
        },
        factory="parlay.drafters.counting.ngram_caches:NgramCaches",
    ),
    Entry(
        name="reference-copy",
        family="copy",
        exactness=Exactness.BITS,
        training="none",
        needs="requests with references",
        summary="Copies from the request's references what follows the output's last tokens there.",
        when="a text is given that the answer will follow: retrieved documents, predicted outputs",
        reference="Yang et al. 2023 (LLMA), arXiv:2304.04487",
        parameters={
            "max_ngram": Parameter(int, 5, "longest match that is looked for", low=1, high=32),
            "min_ngram": Parameter(int, 1, "fewest tokens that must match", low=1, high=32),
            "resync": Parameter(bool, False, "the first reference foretells the output: start and go on where it is"),
            **budget(19),
        },
        factory="parlay.drafters.copying.reference_copy:ReferenceCopy",
        toys=("", "resync=true"),
    ),
    Entry(
        name="prediction",
        family="copy",
        exactness=Exactness.BITS,
        training="none",
        needs="requests with a prediction",
        summary="Copies from a predicted output, through whatever is changed in it; else drafts as another strategy.",
        when="most of the answer is known: a file or a text that is to be edited",
        reference="OpenAI, Predicted Outputs, platform.openai.com/docs/guides/predicted-outputs",
        parameters={
            "fallback": Parameter(
                tuple, ("prompt-lookup",), "what drafts where the prediction can't; empty: nothing", strategies=True
            ),
            **budget(63),
        },
        factory="parlay.drafters.copying.prediction:Prediction",
        toys=("", "fallback="),
    ),
    Entry(
        name="aggressive",
        family="copy",
        exactness=Exactness.BITS,
        training="none",
        needs="nothing; best with the source as a reference",
        summary="Takes the output for its source: drafts all that is left of references or prompt.",
        when="the answer is the prompt with few changes: corrections, rewriting",
        reference="Sun et al. 2021 and Ge et al. 2022 (input-guided aggressive decoding), arXiv:2205.10350",
        parameters={
            "ngram": Parameter(int, 3, "most tokens that must be found, once, to go on in the source", low=1, high=32),
            **budget(63),
        },
        factory="parlay.drafters.copying.aggressive:Aggressive",
    ),
    Entry(
        name="adaptive-ngram",
        family="copy",
        exactness=Exactness.BITS,
        training="none",
        needs="nothing",
        summary="An n-gram model of prompt and output, with back-off to shorter n-grams, writes ahead.",
        when="long outputs of one style, without a match to copy",
        reference="Ou et al. 2024 (ANPD), arXiv:2404.08698",
        parameters={
            "ngram": Parameter(int, 5, "longest n-gram, the drafted token included", low=2, high=16),
            **budget(10),
        },
        factory="parlay.drafters.counting.adaptive_ngram:AdaptiveNgram",
    ),
)
