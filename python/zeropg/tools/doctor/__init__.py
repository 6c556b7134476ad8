"""`python -m zeropg doctor`: what is built, what this machine can use, and why not."""
