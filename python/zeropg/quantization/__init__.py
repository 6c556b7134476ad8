"""Frozen weights in 4 or 8 bits under adapters; the names of the package zeropg are what users see."""
