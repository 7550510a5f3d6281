"""Heads in the forms in which others publish them: what a file of theirs says, as a head of Parlay's, and back."""
