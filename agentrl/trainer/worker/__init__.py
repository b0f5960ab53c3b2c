"""The trainer in a process of its own: the process, its protocol, its client."""
