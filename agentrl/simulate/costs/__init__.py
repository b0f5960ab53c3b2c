"""The costs of a simulated run: the model, the defaults of GPUs, and the settings of a run file."""
