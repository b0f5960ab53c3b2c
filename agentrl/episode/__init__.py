"""One record of an episode: its words, its checks, its form in files and messages, its summary, and its picture."""
