"""What zeros in weights cost in right guesses, and what they could save in time."""
