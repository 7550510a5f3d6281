"""From each protocol's bodies to what the server runs, a file for each."""
