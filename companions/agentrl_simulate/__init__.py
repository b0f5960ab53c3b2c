"""Plays runs in virtual time: the engine's admission rule and batches, with costs instead of models."""
