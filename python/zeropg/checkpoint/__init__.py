"""Checkpoints that load at any world size and stage, whole state dicts, and averages of weights."""
