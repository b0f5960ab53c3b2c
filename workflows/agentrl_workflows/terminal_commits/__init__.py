"""Tasks from the history of a project: `python -m agentrl_workflows.terminal_commits` makes a Harbor folder."""
