"""Sharded models and optimizers for torch.distributed.checkpoint (DCP): `dcp_state_dict`."""
