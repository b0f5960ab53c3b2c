"""tau2: customer service with databases; its tasks, its tools in worker processes, and its grading."""
