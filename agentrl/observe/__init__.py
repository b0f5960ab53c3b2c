"""The records of a run (`metric_keys`: the vocabulary, `records`: the files) and its display (`progress`, `stall`)."""
