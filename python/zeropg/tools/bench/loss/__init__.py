"""`python -m zeropg bench loss`: what compression does to the loss, and to the time until a loss is reached."""
