"""The decoder in C: a forward is one call. `weights` packs, `forward` runs, `product` is one matrix alone."""
