"""A server that answers from a script, in process or over HTTP."""
