"""Showing an episode to a person: as text in a terminal, and as HTML in a notebook."""
