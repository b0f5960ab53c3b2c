"""Reading the directory of a run, also while it is written: `agentrl.open_run("runs/demo")`."""
