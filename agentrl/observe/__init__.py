"""The records of a run (`metric_keys`: the vocabulary, `records`: the files, `runs`: their readers) and its display."""
