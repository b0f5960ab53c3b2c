"""Episodes in worker processes: `runner.RemoteRunner` on the driver's side, `process` on the worker's."""
