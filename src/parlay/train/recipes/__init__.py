"""Recipes: what a trained drafter learns from and its loss. One loop runs every recipe."""
