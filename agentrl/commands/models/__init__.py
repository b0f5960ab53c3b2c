"""Commands that make a model from others."""
