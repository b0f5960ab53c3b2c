"""Rewards: extraction and comparison of answers, grading in worker processes, judges, and how rewards are put together."""
