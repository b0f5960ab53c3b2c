"""Structured output and forced tool calls, asked for in the prompt because decoding is free."""
