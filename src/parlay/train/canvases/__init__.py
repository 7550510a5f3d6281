"""Training of models that fill masked positions, and of models that converge in few parallel forwards."""
