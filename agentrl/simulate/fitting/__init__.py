"""Fits a cost model to a finished run: its servers, its trainer, its driver, and then the run as a whole."""
