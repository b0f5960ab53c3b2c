"""Servers that agentrl ships and that speak SGLang's HTTP protocol."""
