"""`python -m zeropg logs`."""
