"""Linear layers cut over neighbouring ranks, as the configuration's block `tensor_parallel` asks for."""
