"""Episodes in the formats of others: what `agentrl export` writes and `agentrl view` opens."""
