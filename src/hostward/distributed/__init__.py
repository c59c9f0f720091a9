"""One file for each way to spread a model over processes: DDP, FSDP2, tensor, expert, pipeline parallelism."""
