"""Ranks: processes that run one model together, a part each. Rank 0 has the engine, the others repeat its calls."""
