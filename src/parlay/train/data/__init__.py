"""Training data of drafters: prompts, the target's own answers to them, and the target's features of both."""
