"""How the weights of a run reach the servers."""
