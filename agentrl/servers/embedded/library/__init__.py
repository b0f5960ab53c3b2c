"""Models that transformers computes: their weights, their rows, and their steps. Imported where a model needs it."""
