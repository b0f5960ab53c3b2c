"""Inference: the seam the client samples through, SGLang servers and a pool of them, embedded and scripted servers."""
