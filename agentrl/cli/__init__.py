"""What people start: the commands of `agentrl`, and one episode from a notebook."""
