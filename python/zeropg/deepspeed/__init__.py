"""DeepSpeed's configuration and calls over zeropg's sharded module."""
