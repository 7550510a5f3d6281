"""The native decoder in torch operators, for every device."""
