"""Shards a captured forward over the devices of a group: tensor, sequence and context parallelism."""
