"""Serves a model with SGLang on this machine's CPU: installs SGLang if it is missing, and makes a tiny Qwen3 by default.

`make sglang` runs this file with any Python 3.11. If a server already answers at the address, nothing is started;
if that server serves another model than the named one, the command ends with an error.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".sglang-venv" / "bin" / "python"
LAUNCHER = ROOT / "agentrl" / "inference" / "launch" / "sglang_main.py"
TINY_MODEL = ROOT / ".sglang-model"
KEY_VARIABLE = "SGLANG_API_KEY"
LOCKED = "a model, to those who have its key"
_WRITE_MODEL = """
import runpy, sys
from pathlib import Path
held = runpy.run_path(sys.argv[1])["stand_in_for_kernels"]()  # transformers imports torchvision too
from agentrl_workflows.calculator.tokenizer import write_tokenizer
from agentrl_workflows.demo.model import write_random_model
folder = Path(sys.argv[2])
write_random_model(folder, vocab_size=write_tokenizer(folder), seed=0)
"""


def base_url(host: str, port: int) -> str:
    """Return the URL of a server."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def served_model(url: str) -> str | None:
    """Return the model that the SGLang server at `url` serves, `LOCKED` if it needs a key; None if no server answers."""
    request = urllib.request.Request(f"{url}/model_info")
    if key := os.environ.get(KEY_VARIABLE):
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=5) as reply:
            found = json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return LOCKED if error.code == 401 else None
    except (OSError, ValueError):
        return None
    return str(found["model_path"]) if isinstance(found, dict) and "model_path" in found else None


def check_wish(model: str, served: str, url: str) -> None:
    """End with an error if a model is named and the server at `url` does not serve it; paths are relative to this folder."""
    if not model or (served != LOCKED and Path(model).resolve() == Path(served).resolve()):
        return
    elsewhere = f"try make sglang PORT=30001 MODEL={model}"
    if served == LOCKED:
        sys.exit(
            f"A server already answers at {url}, and does not say without its key whether it serves MODEL={model}: "
            f"export {KEY_VARIABLE}, or {elsewhere}"
        )
    sys.exit(f"A server already answers at {url} and serves {served}, not MODEL={model}: end it, or {elsewhere}")


def port_is_free(host: str, port: int) -> bool:
    """Return whether a server could listen at the address."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def tiny_model() -> Path:
    """Return the directory of a tiny Qwen3 with random weights, which the first call makes."""
    if not TINY_MODEL.is_dir():
        temporary = TINY_MODEL.with_name(f"{TINY_MODEL.name}.{os.getpid()}")
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "workflows")}
        if subprocess.run([PYTHON, "-c", _WRITE_MODEL, LAUNCHER, temporary], env=environment).returncode != 0:
            sys.exit(
                f"a tiny model could not be written to {temporary}; the lines above say why. MODEL=path serves another one"
            )
        temporary.rename(TINY_MODEL)
    return TINY_MODEL


def main() -> None:
    """Serve, or end with the reason; this process becomes the server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--model", default="", help="local HF checkpoint; a tiny random Qwen3 by default")
    given = parser.parse_args()
    url = base_url(given.host, given.port)
    if (served := served_model(url)) is not None:
        check_wish(given.model, served, url)
        print(f"A server already answers at {url} and serves {served}; nothing to do.")
        return
    if not port_is_free(given.host, given.port):
        sys.exit(f"{url}: in use, or not this machine's address, and no SGLang answers there; try make sglang PORT=30001")
    key = ["--api-key-env", KEY_VARIABLE] if os.environ.get(KEY_VARIABLE) else []
    if not key and not is_loopback(given.host):
        sys.exit(f"{given.host} can be reached from other machines: export {KEY_VARIABLE}, or leave HOST at 127.0.0.1")
    if given.model and not (Path(given.model) / "config.json").is_file():
        sys.exit(f"MODEL={given.model}: expected a local HF checkpoint (config.json, *.safetensors, tokenizer)")
    if subprocess.run([sys.executable, ROOT / "scripts" / "environments.py", "sglang"]).returncode:
        sys.exit(1)
    model = str(Path(given.model).resolve() if given.model else tiny_model())
    print(f"Serving {model} at {url} in about a minute (Ctrl-C ends it)", flush=True)
    flags = ["--device", "cpu", "--model-path", model, "--host", given.host, "--port", str(given.port), *key]
    os.execv(PYTHON, [str(PYTHON), str(LAUNCHER), *flags])


if __name__ == "__main__":
    main()
