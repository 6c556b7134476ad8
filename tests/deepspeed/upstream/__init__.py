"""What DeepSpeed's own unit tests assert of its public behaviour, in this project's words: gradients against DDP or a
plain process, outputs, frozen and unused parameters, accumulation, sharded construction.

Their names there: runtime/zero, v1/zero, v1/half_precision, checkpoint, runtime.
"""
