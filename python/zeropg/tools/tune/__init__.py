"""`python -m zeropg tune`: the fastest configuration of a script, found by short runs."""
