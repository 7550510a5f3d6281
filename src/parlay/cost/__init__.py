"""The cost of forwards: their seconds, by rows and context."""
