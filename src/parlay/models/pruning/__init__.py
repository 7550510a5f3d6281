"""Makes models smaller without training: weights set to zero, fewer inner units, fewer layers."""
