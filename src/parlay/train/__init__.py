"""Training of language models from scratch: text files, tokenizer, loop, export."""
