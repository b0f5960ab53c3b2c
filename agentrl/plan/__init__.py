"""What a run will do and need, from its file alone."""
