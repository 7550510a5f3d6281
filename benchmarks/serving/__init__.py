"""Load that a server must survive: many requests at once, some of which misbehave."""
