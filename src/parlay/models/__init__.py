"""Models with their caches: the runners."""
