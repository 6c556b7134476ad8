"""Optimizers over shards: `shard_optimizer`, how it updates flat slices, and loss scaling."""
