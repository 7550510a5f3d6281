"""Recipes: what each drafter learns from, and its loss. The same training loop runs all of them."""
