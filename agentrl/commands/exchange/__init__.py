"""Commands that hand episodes to other programs."""
