"""Runs one model in several processes, the ranks. Rank 0 has the engine; the other ranks repeat the calls of its
runner."""
