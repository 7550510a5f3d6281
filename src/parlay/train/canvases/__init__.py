"""Training of models that fill masked places, and of models that converge in few parallel forwards."""
