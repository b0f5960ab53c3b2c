"""Serve a resource server of the real nemo-gym package, such as `example_session_state_mgmt`; prints the port."""

from __future__ import annotations

import importlib
import socket
import sys
from unittest.mock import MagicMock

import uvicorn
from nemo_gym.base_resources_server import BaseResourcesServerConfig, SimpleResourcesServer
from nemo_gym.server_utils import ServerClient

module = importlib.import_module(f"resources_servers.{sys.argv[1]}.app")
[server_class] = [
    found
    for found in vars(module).values()
    if isinstance(found, type) and issubclass(found, SimpleResourcesServer) and found.__module__ == module.__name__
]
config = BaseResourcesServerConfig(host="127.0.0.1", port=0, entrypoint="app.py", name=sys.argv[1])
config = server_class.model_fields["config"].annotation(**config.model_dump())
app = server_class(config=config, server_client=MagicMock(spec=ServerClient)).setup_webserver()
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen()
print(listener.getsockname()[1], flush=True)  # noqa: T201 - the test reads it
uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])
