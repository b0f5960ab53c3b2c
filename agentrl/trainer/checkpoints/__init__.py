"""Checkpoints: their contents, who writes which part, and how any number of ranks continues from them."""
