"""DeepSpeed's `runtime`: the places from which scripts import some names."""
