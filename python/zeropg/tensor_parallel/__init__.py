"""Parameters that torch has distributed over other ranks than those of the model (DTensors: tensor parallelism)."""
