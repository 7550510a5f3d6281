"""What the operating system gives: threads, the processor, the terminal, the user's cache folder."""
