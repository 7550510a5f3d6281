"""Recipes: for each kind of drafter its module, its loss and its initial weights. One loop runs every recipe."""
