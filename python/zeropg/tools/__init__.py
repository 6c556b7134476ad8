"""The commands of `python -m zeropg`, one module or folder each, and what they share about the machine."""
