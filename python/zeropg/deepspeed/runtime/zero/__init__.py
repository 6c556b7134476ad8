"""DeepSpeed's `runtime.zero`: the places from which scripts import some names."""
