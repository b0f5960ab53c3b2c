"""Real traffic as a source of training data: keys, conversations, feedback, and the server that takes them."""
