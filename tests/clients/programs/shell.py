"""The tool that the agents of this folder have."""

import subprocess


def bash(command: str, timeout: float = 60.0) -> str:
    """Run a shell command and return its output.

    Args:
        command: the command.
        timeout: seconds that it has.
    """
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=timeout, check=False)
    return done.stdout + done.stderr


PARAMETERS = {
    "type": "object",
    "properties": {"command": {"type": "string"}, "timeout": {"type": "number", "default": 60.0}},
    "required": ["command"],
}
"""The JSON schema of its arguments."""
