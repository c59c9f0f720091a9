"""Put hostward into the trainers of other libraries. Each module imports its library; nothing here imports them all."""
