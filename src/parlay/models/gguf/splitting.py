"""How text is split into words before byte-pair merges, by ``tokenizer.ggml.pre``, as each model was trained.

The regular expressions are those of the models' own tokenizer.json files. A wrong one would silently change tokens, so
unknown names are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_SEED_CODER = _QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")


@dataclass(frozen=True, slots=True)
class Splitting:
    """Rules for splitting text; each of ``expressions`` splits the pieces that the one before left.

    ``whole_words``: a word that is a token is not split further. ``bos``: texts begin with the bos token unless the
    file says otherwise. ``composed``: text is normalized to Unicode's composed form (NFC) first.
    """

    expressions: tuple[str, ...]
    whole_words: bool = False
    bos: bool = False
    composed: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """A pre-tokenizer that splits text and maps its bytes to the letters of byte-level vocabularies."""
        splits = [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in self.expressions]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_NAMES: Mapping[Splitting, tuple[str, ...]] = {
    Splitting((_LLAMA3,), whole_words=True, bos=True): (
        "llama-bpe",
        "llama3",
        "llama-v3",
        "falcon3",
        "pixtral",
        "midm-2.0",
    ),
    Splitting((_LLAMA3,)): ("smaug-bpe", "dbrx"),
    Splitting((_QWEN2,), composed=True): ("qwen2",),
    Splitting((_QWEN2,)): ("deepseek-r1-qwen", "megrez", "kormo", "hunyuan"),
    Splitting((_TEKKEN,), whole_words=True, bos=True): ("tekken",),
    Splitting((_O200K,)): ("gpt-4o",),
    Splitting((_SEED_CODER,)): ("seed-coder",),
    Splitting((r"\p{N}", GPT2)): ("smollm", "starcoder", "refact", "codeshell", "minerva-7b", "mellum2"),
    Splitting((GPT2,)): ("gpt-2", "gpt2", "mellum", "trillion", "a.x-4.0", "phi-2", "exaone4"),
    Splitting((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")): ("deepseek-coder",),
    Splitting((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")): ("default",),
}
SPLITTINGS = {name: splitting for splitting, names in _NAMES.items() for name in names}
"""Splittings by their name in ``tokenizer.ggml.pre``."""
