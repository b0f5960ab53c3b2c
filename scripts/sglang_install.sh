#!/usr/bin/env bash
# Make .sglang-venv with a CPU build of sglang 0.5.23. Does nothing when it is there already; an installation that was broken
# off is started anew.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.sglang-venv
python=${PYTHON:-python3}
stamp=$venv/.ready
need_mb=5000

if [ -e "$stamp" ] && [ ! scripts/sglang_requirements.txt -nt "$stamp" ]; then exit 0; fi
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || {
  echo "The pinned SGLang environment was tried on Python 3.11 only; got $("$python" --version). Use make sglang PYTHON=python3.11." >&2
  exit 1
}
rm -rf "$venv"
have_mb=$(df -Pm . | awk 'NR==2 {print $4}')
if [ "$have_mb" -lt "$need_mb" ]; then
  echo "The SGLang environment needs $need_mb MB of disk, $have_mb MB are free under $(pwd). Free some and run make sglang again." >&2
  exit 1
fi
echo "Installing SGLang 0.5.23 for CPUs into $(pwd)/$venv (2.8 GB, some minutes)"
"$python" -m venv "$venv"
install() {
  "$venv/bin/pip" install --quiet --disable-pip-version-check "$@" || {
    echo "Installing $* into $venv failed; the lines above name the missing package. Mend it and run make sglang again." >&2
    exit 1
  }
}
install --no-deps torch==2.13.0 torchvision==0.28.0 transformers==5.19.0 triton
install -r scripts/sglang_requirements.txt
install --no-deps sglang==0.5.23
"$venv/bin/python" agentrl/inference/sglang_launcher.py --device cpu --help > /dev/null || {
  echo "SGLang is installed in $venv, but does not start; the lines above say why. Mend it and run make sglang again." >&2
  exit 1
}
touch "$stamp"
