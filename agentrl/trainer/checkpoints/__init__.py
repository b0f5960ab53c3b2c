"""Checkpoints: what is in one, who writes which part of it, and how any number of ranks continues from it."""
