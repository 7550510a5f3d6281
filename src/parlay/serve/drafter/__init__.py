"""A drafter served to other processes: `parlay serve --drafter-only`."""
