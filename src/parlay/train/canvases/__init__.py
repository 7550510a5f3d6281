"""Training of models that fill masked places, and of causal models whose Jacobi iterations converge in few forwards."""
