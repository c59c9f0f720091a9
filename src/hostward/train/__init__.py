"""What `hostward train` runs: models, data, schedule and loop."""
