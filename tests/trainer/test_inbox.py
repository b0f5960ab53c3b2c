"""The stream from the driver, when it ends."""

from __future__ import annotations

import io
import socket
import struct
import subprocess
import sys

import pytest

from agentrl.trainer.worker.process import Inbox

INSIDE_A_REQUEST = """
import socket, sys, threading
from agentrl.trainer.worker.process import Inbox
driver = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
inbox = Inbox(driver.makefile("rb"), ends="at once")
print("joined", flush=True)
threading.Event().wait()
"""


def reset(connection: socket.socket) -> None:
    """Close a connection as the system does for a process that is killed with unread bytes."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.starts
def test_a_reset_connection_ends_a_rank_that_is_inside_a_request() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-c", INSIDE_A_REQUEST, str(listener.getsockname()[1])]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as rank:
            connection, _ = listener.accept()
            assert rank.stdout is not None
            assert rank.stdout.readline() == b"joined\n"
            reset(connection)
            try:
                assert rank.wait(300) == 1
            finally:
                rank.kill()


@pytest.mark.starts
def test_a_reset_stream_is_the_end_of_input_between_two_requests() -> None:
    class Reset(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: object) -> int:
            raise ConnectionResetError("Connection reset by peer")

    assert Inbox(io.BufferedReader(Reset()), ends="when idle").next() is None
