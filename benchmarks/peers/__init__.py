"""Measures other engines on the same checkpoint and prompts, each in an environment of its own, all with one
stopwatch."""
