"""What a script or a notebook calls: `train`, `evaluate`, `serve` and `run_episode`, with plain arguments."""
