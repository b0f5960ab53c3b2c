"""Inference: the seam that the client samples through, the client of a server, a pool of servers, and their launch."""
