"""The command line: the `agentrl` command, and its checks and environments."""
