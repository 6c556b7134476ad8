"""Weights in 16 bits, in Hugging Face's layout: `save_16bit_weights`."""
