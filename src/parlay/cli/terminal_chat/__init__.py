"""A chat in the terminal: the conversation, commands that change it, and the loop that reads and answers."""
