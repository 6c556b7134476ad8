"""`python -m zeropg logs`: the logs of all ranks of a run as one text."""
