"""What this machine is, and how fast: facts and measurements for `hostward doctor` and `hostward bench machine`."""
