"""llama-server's own API, which editors use."""

RANDOM_SEEDS = (-1, 2**32 - 1)
"""Seeds that mean no seed, as clients send these by default."""

LAST_FIELD = "stop"
"""The field of each event of a stream that is true in the last one."""
