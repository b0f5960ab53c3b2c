"""Bundled workflows."""
