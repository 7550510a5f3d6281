"""Models in GGUF files beside llama.cpp: how near the numbers are, what forwards cost, and how a file loads."""
