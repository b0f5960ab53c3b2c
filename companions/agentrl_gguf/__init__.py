"""Models in GGUF files: read, checked, and written as Hugging Face directories, once for each file."""
