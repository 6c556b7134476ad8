"""What ranks agree on, and the files that they write together. Knows no model."""
