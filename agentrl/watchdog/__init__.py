"""What watches a running command: a blocked event loop, stacks, signals."""
