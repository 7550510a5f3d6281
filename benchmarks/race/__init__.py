"""Makes the picture at the top of the README: one answer as it was timed, decoded plainly and with the default
strategy."""
