"""Measures quality under parallelism: generated tasks, scores, and curves of accuracy against tokens per forward."""
