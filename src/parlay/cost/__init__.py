"""What forwards cost, by rows and context."""
