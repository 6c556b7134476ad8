"""Checkpoints that DeepSpeed has written: read at any world size, without running a pickle."""
