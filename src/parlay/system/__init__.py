"""The operating system: threads, the processor, the terminal, the user's cache folder."""
