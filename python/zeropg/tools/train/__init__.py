"""`python -m zeropg train`: a GPT of about two million parameters, trained, exported and checked end to end."""
