"""The watch over a running command: its event loop, the stacks that block it, and the signals that end it."""
