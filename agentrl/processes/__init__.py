"""One kit for child processes: start them, link them to this process by frames, notice their ends, and give them jobs."""
