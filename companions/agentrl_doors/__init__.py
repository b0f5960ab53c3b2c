"""Doors: the policy over HTTP for programs that speak a model API, in an episode, as a server, or for real clients."""
