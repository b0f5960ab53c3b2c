"""The plan of a run: memory, mesh, split, route and problems, from its file alone."""
