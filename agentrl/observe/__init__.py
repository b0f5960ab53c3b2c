"""What a run writes (`metrics`: the vocabulary, `records`: the files) and shows (`progress`, `stall`)."""
