"""`agentrl init`: a new folder with an agent, its tasks, its tests and its run."""
