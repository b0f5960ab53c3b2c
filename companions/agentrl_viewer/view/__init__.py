"""The viewer: `agentrl view RUN` serves one page that shows a run, live or ended; `--html` writes one episode to a file."""
