"""The sharded module as Python sees it: `fully_shard`, access to whole values and shards, `load_state_dict`.

What is public is in `zeropg` itself; a program that imports from here may break with any release. So in all folders.
"""
