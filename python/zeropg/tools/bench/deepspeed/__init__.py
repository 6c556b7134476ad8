"""A script of DeepSpeed's users under DeepSpeed and under `zeropg.deepspeed`: `python -m zeropg bench deepspeed`."""
