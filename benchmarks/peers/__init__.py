"""Other engines on the same checkpoint and prompts: each in an environment of its own, all by one stopwatch."""
