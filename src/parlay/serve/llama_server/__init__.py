"""llama-server's own API, as editors speak it."""

RANDOM_SEEDS = (-1, 2**32 - 1)
"""Seeds that ask for none: clients send this default."""
