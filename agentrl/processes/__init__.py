"""One kit for child processes: start them, link them to this process by frames, notice their ends, and give them jobs.

`watchdog` watches the process that it runs in.
"""
