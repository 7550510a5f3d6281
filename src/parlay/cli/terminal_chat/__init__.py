"""A conversation at the terminal: what was said, the commands that change it, and the loop that reads and answers."""
