"""What a run's files prove, and how two runs differ."""
