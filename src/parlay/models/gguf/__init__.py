"""Models in GGUF files: quantized weights, config, tokenizer and chat template in one file."""

SUFFIX = ".gguf"
