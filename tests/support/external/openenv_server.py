"""Serves an OpenEnv environment of our own; started by path with the Python of .envs-venv. Prints its port."""

from __future__ import annotations

import os
import random
import socket
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    number: int
    why: str = ""


class Hint(Observation):
    text: str


class Higher(Environment):
    """Guess a number from 1 to 8 in four guesses. Guessing 13 raises, 666 ends the server, -1 ends it and pays NaN."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number, self.left = 0, 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, limit: int = 8, **kwargs: object) -> Hint:
        self.number, self.left = random.Random(seed).randint(1, limit), 4
        return Hint(text=f"I have a number from 1 to {limit}.")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: object) -> Hint:
        if action.number == 13:
            raise OSError("the disk is full")
        if action.number == 666:
            os._exit(1)
        if action.number == -1:
            return Hint(text="", reward=float("nan"), done=True)
        self.left -= 1
        if action.number == self.number:
            return Hint(text="Yes.", reward=1.0, done=True)
        word = "higher" if action.number < self.number else "lower"
        return Hint(text=f"It is {word}.", reward=0.0, done=self.left == 0)

    @property
    def state(self) -> State:
        return State()


def main() -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    app = create_app(Higher, Guess, Hint, env_name="higher", max_concurrent_envs=int(sys.argv[1]))
    print(listener.getsockname()[1], flush=True)  # noqa: T201 - the test reads it
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    main()
