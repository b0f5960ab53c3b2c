"""The asynchronous loop: staleness, buffer, version clock, training, evaluation. Start at `engine.engine.Engine`."""
