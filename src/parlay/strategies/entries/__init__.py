"""The entries of the catalogue, one module per family of strategies. They import no heavy modules."""
