"""`python -m zeropg export` and `zero_to_fp32`: weights out of checkpoints, without the job that saved them."""
