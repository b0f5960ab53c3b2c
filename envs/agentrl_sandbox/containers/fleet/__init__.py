"""Containers on other machines: `agentrl sandbox-host` gives them, and a run places its episodes on several of them."""
