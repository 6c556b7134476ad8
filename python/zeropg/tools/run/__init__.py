"""`python -m zeropg run`: torchrun on every host of a hostfile, as one command."""
