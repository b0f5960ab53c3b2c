"""Bundled environments."""
