"""Training of translators that write token by token, and of those that fill a canvas with the whole answer."""
