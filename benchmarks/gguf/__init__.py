"""Compares models in GGUF files with llama.cpp: the accuracy of logits, the cost of forwards, and the loading of
files."""
