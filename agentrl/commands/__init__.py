"""What a command, a script or a notebook starts: training, evaluation, serving, a warm start, one episode."""
