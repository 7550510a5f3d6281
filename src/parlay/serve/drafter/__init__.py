"""A drafter as a service for other processes: `parlay serve --drafter-only`."""
