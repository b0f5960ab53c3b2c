"""What a simulated run costs: the model, the defaults of GPUs, and the settings of a run file."""
