"""Bundled terminal tasks as folders of Harbor; `python -m agentrl_workflows.terminal_tasks DIR` writes them."""
