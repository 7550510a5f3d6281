"""The decoder in C: a forward is one call. `build` makes the library, `library` loads it, `forward` runs it."""
