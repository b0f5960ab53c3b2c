"""The asynchronous loop: staleness, buffer, version clock, training, evaluation. Start at `agentrl.engine.engine.Engine`."""
