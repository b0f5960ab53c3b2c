"""Starting inference servers as child processes."""
