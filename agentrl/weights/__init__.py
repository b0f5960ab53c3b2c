"""Weights on their way from the trainer to the servers: through directories that appear whole, or through process groups."""
