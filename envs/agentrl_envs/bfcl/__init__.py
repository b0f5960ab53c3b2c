"""The Berkeley Function Calling Leaderboard, version 4: its tasks, its backends in worker processes, and its grading."""
