"""`agentrl online`: a run whose episodes are conversations with real clients.

Invariant: bad input is reported before any process starts. The run begins, resumes and ends as one of `agentrl train`.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.commands.ending import describe_interrupted_run
from agentrl.commands.running import Overrides, load_run, run_job
from agentrl.commands.train import train_run
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.tokens.renderer import Renderer
from agentrl_doors.online.placeholders import ONLINE_DEFAULTS

if TYPE_CHECKING:
    from agentrl.engine.parts import GroupSource
    from agentrl_doors.online.client_keys import KeyRing
    from agentrl_doors.online.traffic import TrafficSettings


def online_command(
    config: Path,
    /,
    *overrides: Overrides,
    keys: Path | None = None,
    keys_env: str | None = None,
    new_key: str | None = None,
    host: str = "127.0.0.1",
    port: int = 30001,
    requests_per_minute: int = 120,
    calls_per_key: int = 16,
    idle_s: float = 1800.0,
    max_conversations: int = 1024,
    replace: bool = False,
    resume: bool = False,
) -> None:
    """Serve the policy to real clients over HTTP, and train it on their feedback while it serves.

    Args:
        config: YAML file that describes the run; workflow and tasks are for evaluations alone and may be missing.
        overrides: Fields of the file to override, such as --trainer.lr 1e-5 --name second-try.
        keys: File of the clients: lines of a name and the SHA-256 of a key. NAME/calls and NAME/feedback open one of both.
        keys_env: Environment variable with the clients, as NAME:KEY words.
        new_key: Make a key for a client of this name, print it, add its hash to the file --keys, and start nothing.
        host: Address to listen on.
        port: Port to listen on; 0 picks a free one.
        requests_per_minute: Requests of one key within a minute; further ones get 429.
        calls_per_key: Model calls of one key that run at the same time; further ones get 429.
        idle_s: Seconds after the last request or feedback at which a conversation ends.
        max_conversations: Conversations open at once, those that wait for feedback included; further ones get 503.
        replace: Delete an existing runs/NAME/ first, its conversations included; without this flag it is an error.
        resume: Continue from the newest checkpoint in runs/NAME/, with the feedback that no checkpoint holds.
    """
    from agentrl.servers.listening import check_listening
    from agentrl_doors.online.client_keys import KeyRing, add_key, read_key_hashes
    from agentrl_doors.online.traffic import TrafficSettings

    if new_key is not None:
        if keys is None:
            raise ConfigError("--new-key needs --keys FILE, where the hash of the key goes")
        print(add_key(keys, new_key))
        return
    if replace and resume:
        raise ConfigError("--replace deletes the run that --resume would continue; pass only one of them")
    if min(requests_per_minute, calls_per_key, max_conversations) < 1 or not 0 < idle_s < float("inf"):
        raise ConfigError("--requests-per-minute, --calls-per-key, --max-conversations and --idle-s must be positive")
    run = load_run(config, overrides, ONLINE_DEFAULTS)
    check_online(run)
    read = partial(read_key_hashes, keys, keys_env)
    ring = KeyRing(read(), requests_per_minute=requests_per_minute, max_calls=calls_per_key, file=keys, read=read)
    check_listening(host, port)  # before the run has a directory
    settings = TrafficSettings(idle_s=idle_s, max_conversations=max_conversations)
    source = partial(_make_traffic, settings=settings, keys=ring, host=host, port=port)
    existing = "replace" if replace else "resume" if resume else "error"
    job = partial(train_run, run, existing=existing, may_exit=True, make_source=source)
    run_job(job, partial(describe_interrupted_run, run))


def check_online(run: RunConfig) -> None:
    """Raise `ConfigError` where the settings of a run do not fit conversations with clients."""
    algorithm = run.algorithm
    if algorithm.staleness_policy == "wait":
        raise ConfigError(
            "algorithm.staleness_policy: wait makes servers wait for the trainer, and users do not wait; set drop, which "
            "leaves conversations with a token over algorithm.max_staleness, or mask, which leaves such tokens alone"
        )
    if algorithm.group_size * algorithm.groups_per_step < 2:
        raise ConfigError(
            "algorithm.group_size: one conversation a step has nothing that it could be compared with; raise it to 2 or more"
        )


def _make_traffic(
    run: RunConfig, renderer: Renderer, *, settings: TrafficSettings, keys: KeyRing, host: str, port: int
) -> GroupSource:
    from agentrl_doors.online.server import serve_clients
    from agentrl_doors.online.traffic import Traffic

    served = partial(serve_clients, keys=keys, host=host, port=port, on_ready=_announce)
    return Traffic(renderer, run, settings, served)


def _announce(url: str) -> None:
    print(
        f"serving the policy at {url}/v1 and {url}; feedback goes to {url}/feedback (Ctrl-C ends the run)",
        file=sys.stderr,
        flush=True,
    )
