"""The cost of forwards, by rows and context."""
