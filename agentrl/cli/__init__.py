"""Starting things: the command line, local processes, notebooks."""
