"""Models in GGUF files: weights in their own blocks, config, tokenizer and chat template, all from one file."""

SUFFIX = ".gguf"
