"""Training of translators: one kind writes token by token, the others fill a canvas with the whole answer."""
