"""Training of drafters, canvas models, translators and small language models: data, recipes, loops and saving."""
