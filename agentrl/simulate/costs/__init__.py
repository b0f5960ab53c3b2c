"""What a simulated run costs: the model, its fit to a run, the defaults of GPUs, and the settings of a run file."""
