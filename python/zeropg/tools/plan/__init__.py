"""What a training run will take, before anything is allocated: the one source of these formulas."""
