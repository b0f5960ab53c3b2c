"""The commands of `agentrl`: each with its flags and its work in one file, and the same from Python in `python/`."""
