"""Ranks: several processes that each run a part of one model. Rank 0 has the engine; the others repeat its runner's
calls."""
