"""The library in C: how it is built and loaded, and its structures. The sources are in `core/`."""
