"""`agentrl online`."""
