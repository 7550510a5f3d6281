"""The entries of the catalogue, a module for each family of strategies. Nothing heavy is imported here."""
