"""Text at the edge of the engine: tokenizing, detokenizing, chat templates, prompts and documents."""
