"""Kubernetes, by `kubectl`: each environment is a `Sandbox` of agent-sandbox (kubernetes-sigs), whose pod runs a supervisor.

The image needs `python3`, 3.9 or newer. Isolation is that of the cluster: name a runtime class such as gVisor's in `pod`,
and keep the pods' network closed by a policy.

Invariant: a sandbox has a name of its own, by which it is deleted when its block ends, and a time after which the cluster
deletes it without this process.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

import anyio

from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.sandbox.box import BOX_START_S, Use, open_session, wait_until_ready
from agentrl.sandbox.containers.services.boot import BOOT, boot_message
from agentrl.sandbox.containers.services.copied import StartedEnvironment, WantedEnvironment
from agentrl.sandbox.containers.services.relayed_port import BytePipe
from agentrl.sandbox.docker import docker_variables
from agentrl.sandbox.pipes import PipedBox, PipedProcess, process_pipe
from agentrl.sandbox.types import Limits, Program

READY_S: Final = 300.0
"""Seconds that the cluster has to start a pod, the download of its image included."""
_COMMAND_S: Final = 60.0
_CONTAINER: Final = "agent"
_RESOURCE: Final = "sandboxes.agents.x-k8s.io"


def sandbox_manifest(
    name: str, wanted: WantedEnvironment, *, api_version: str, pod: Mapping[str, object], ends_at: datetime
) -> dict[str, object]:
    """Return the object that asks for one environment."""
    size = {"memory": f"{wanted.limits.memory_mb}Mi", "ephemeral-storage": f"{wanted.limits.work_mb}Mi"}
    container = {
        "name": _CONTAINER,
        "image": wanted.image,
        "command": ["sleep", "infinity"],
        "resources": {"limits": size},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec = {"automountServiceAccountToken": False, "restartPolicy": "Never", **pod, "containers": [container]}
    return {
        "apiVersion": api_version,
        "kind": "Sandbox",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/managed-by": "agentrl"}},
        "spec": {
            "podTemplate": {"spec": spec},
            "shutdownTime": ends_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "shutdownPolicy": "Delete",
        },
    }


class KubernetesService:
    """Starts sandboxes of a cluster.

    Args:
        command: `kubectl`, with the context and namespace that it is to use.
        api_version: of agent-sandbox on the cluster.
        pod: further fields of the pod's spec, such as `runtimeClassName`.
        lifetime_s: seconds after which the cluster deletes a sandbox by itself.
    """

    name = "kubernetes"

    def __init__(
        self,
        command: Sequence[str] = ("kubectl",),
        *,
        api_version: str = "agents.x-k8s.io/v1beta1",
        pod: Mapping[str, object] | None = None,
        lifetime_s: float = 7200.0,
    ) -> None:
        self._command, self._api_version = tuple(command), api_version
        self._pod, self._lifetime_s = dict(pod or {}), lifetime_s

    async def check(self) -> None:
        """Refuse a cluster that does not answer, or has no agent-sandbox; the ConfigError has the fix."""
        try:
            await self._ask("get", _RESOURCE, "--output", "name", patience_s=_COMMAND_S)
        except EnvironmentFault as error:
            raise ConfigError(f"{error}; check the context of kubectl, and install kubernetes-sigs/agent-sandbox") from error

    @asynccontextmanager
    async def start(self, wanted: WantedEnvironment) -> AsyncGenerator[StartedEnvironment]:
        """Start a sandbox as `Service.start` describes."""
        name = f"agentrl-{secrets.token_hex(8)}"
        ends_at = datetime.now(UTC) + timedelta(seconds=self._lifetime_s)
        manifest = sandbox_manifest(name, wanted, api_version=self._api_version, pod=self._pod, ends_at=ends_at)

        async def is_alive() -> bool:
            try:
                said = await self._ask("get", _RESOURCE, name, "--output", "name", patience_s=_COMMAND_S)
            except EnvironmentFault:
                return False
            return name in said

        try:
            await self._ask("create", "--filename", "-", data=json.dumps(manifest).encode(), patience_s=_COMMAND_S)
            ready = ("--for=condition=Ready", f"{_RESOURCE}/{name}", f"--timeout={READY_S:g}s")
            await self._ask("wait", *ready, patience_s=READY_S + _COMMAND_S)
            starter = _ExecStarter(self._command, name, dict(wanted.environment))
            async with open_session(starter, ("supervisor",), wanted.limits) as session:
                yield StartedEnvironment(session, is_alive, partial(self._run_python, name))
        finally:
            with anyio.CancelScope(shield=True):
                await self._ask("delete", _RESOURCE, name, "--ignore-not-found", "--wait=false", patience_s=_COMMAND_S)

    @asynccontextmanager
    async def _run_python(self, name: str, program: str, arguments: tuple[str, ...]) -> AsyncGenerator[BytePipe]:
        words = [*_exec_words(self._command, name), program, *arguments]
        async with process_pipe(words, environment=docker_variables()) as pipe:
            yield pipe

    async def _ask(self, *words: str, data: bytes = b"", patience_s: float) -> str:
        """Run a command of kubectl and return what it prints; one that fails is an EnvironmentFault."""
        command = [*self._command, *words]
        try:
            with anyio.fail_after(patience_s):
                done = await anyio.run_process(command, input=data, check=False)
        except TimeoutError:
            raise EnvironmentFault(f"containers: `{' '.join(command)}` took more than {patience_s:g} s") from None
        except OSError as error:
            raise EnvironmentFault(f"containers: cannot start {command[0]}: {error}") from error
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
            raise EnvironmentFault(f"containers: `{' '.join(command)}` failed: {said[-1]}")
        return done.stdout.decode(errors="replace")


def _exec_words(command: Sequence[str], pod: str) -> list[str]:
    """Return the words before a Python program and its arguments that run it in a pod."""
    return [*command, "exec", "--stdin", pod, "--container", _CONTAINER, "--", "python3", "-I", "-S", "-B", "-c"]


class _ExecBox(PipedBox):
    """The supervisor in a pod, through the command that reaches it."""

    async def kill(self) -> None:
        """End the command; the sandbox is deleted with everything in it."""
        if not self._is_dead:
            self._is_dead = True
            self._process.kill()
            with anyio.CancelScope(shield=True):
                await self._process.wait()


class _ExecStarter:
    """Starts a supervisor in a pod."""

    def __init__(self, command: Sequence[str], pod: str, environment: dict[str, str]) -> None:
        self._words = [*_exec_words(command, pod), BOOT]
        self._environment = environment

    @asynccontextmanager
    async def start(self, program: Program, limits: Limits, *, use: Use = "program") -> AsyncGenerator[_ExecBox]:
        """Start the supervisor, yield the way to it, and end that at the block's end."""
        del program, use
        try:
            process = PipedProcess(self._words, environment=docker_variables())
        except OSError as error:
            raise EnvironmentFault(f"containers: cannot start {self._words[0]}: {error}") from error
        box = _ExecBox(process)
        try:
            with anyio.move_on_after(BOX_START_S):
                await box.stdin.send(boot_message(limits, self._environment))
            await wait_until_ready(box.stderr)
            yield box
        except BrokenPipeError:
            said = box.stderr.receive_nowait().decode(errors="replace").strip()
            raise EnvironmentFault(f"containers: no supervisor starts in a pod: {said or 'it said nothing'}") from None
        finally:
            await box.kill()
            process.close()
