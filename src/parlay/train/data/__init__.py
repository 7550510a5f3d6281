"""Training data of drafters: prompts, the target's answers to them, and the target's features of both."""
