"""Text at the edge of the engine: tokenising, detokenising, chat templates, prompts and documents."""
