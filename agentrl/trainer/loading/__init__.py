"""A Hugging Face checkpoint becomes a model, of which each process reads only the parts that it holds."""
