"""The tasks of a run: files and functions that they come from, the order in which they are drawn, and curricula."""
