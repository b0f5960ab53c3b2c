"""One trainer in several processes: who they are, who computes what, and how the model is split among them."""
