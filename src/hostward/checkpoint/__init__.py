"""Save and load training state: atomic, sharded, checksummed, beside training."""
