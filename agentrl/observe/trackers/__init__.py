"""Trackers: send the records of a run to TensorBoard, Weights & Biases, MLflow, OpenTelemetry or a class of your own."""
