"""The calls of a script or a notebook: `train`, `evaluate`, `serve` and `run_episode`, with plain arguments."""
