"""Models made smaller without training: weights set to zero, inner units and whole layers left out."""
