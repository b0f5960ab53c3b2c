"""The error with which a tool speaks to the model; it never counts as a fault of the environment."""


class ToolError(Exception):
    """Raise it inside a tool: its message becomes the tool's reply, for the model to read and try again."""
