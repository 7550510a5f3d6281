"""Finding a model by name, and fetching it from the Hugging Face Hub or a package index."""
