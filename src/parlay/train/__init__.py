"""Training of language models from scratch: corpus, tokenizer, tasks, loop, export and checks."""
