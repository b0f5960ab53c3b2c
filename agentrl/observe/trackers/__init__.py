"""Trackers: what a run records, sent on to TensorBoard, Weights & Biases, MLflow, OpenTelemetry or a class of your own."""
