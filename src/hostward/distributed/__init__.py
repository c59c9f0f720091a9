"""Run a model on several processes: one file each for DDP, FSDP2, tensor, expert and pipeline parallelism."""
