#!/usr/bin/env bash
# Make .sglang-venv: a CPU build of SGLang, and every other package, as scripts/sglang_requirements.txt pins them. Does nothing
# when that is there already. An incomplete installation, or one from other pins or another script, starts again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.sglang-venv
python=${PYTHON:-python3}
requirements=scripts/sglang_requirements.txt
stamp=$venv/.ready # holds what it was installed from
need_mb=5000
wait_s=1800

wanted=$(cat scripts/sglang_install.sh "$requirements" | sha256sum)
ready() { [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; }
if ready; then exit 0; fi
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || {
  echo "The pinned SGLang environment was tried on Python 3.11 only; got $("$python" --version). Use make sglang PYTHON=python3.11." >&2
  exit 1
}
exec 9>> "$requirements" # nothing is written to it: it is what is locked, until this process and those it starts have ended
if ! flock -n 9; then
  echo "Another installation into $(pwd)/$venv is under way; waiting up to $wait_s s for it to end" >&2
  flock -w "$wait_s" 9 || {
    echo "It has not ended. End it (its processes hold $requirements open), or run make sglang again when it is done." >&2
    exit 1
  }
fi
if ready; then exit 0; fi
rm -rf "$venv"
have_mb=$(df -Pm . | awk 'NR==2 {print $4}')
if [ "$have_mb" -lt "$need_mb" ]; then
  echo "The SGLang environment needs $need_mb MB of disk, $have_mb MB are free under $(pwd). Free some and run make sglang again." >&2
  exit 1
fi
echo "Installing SGLang $(sed -n 's/^sglang==//p' "$requirements") for CPUs into $(pwd)/$venv (2.8 GB, some minutes)"
"$python" -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps -r "$requirements" || {
  echo "Installing $requirements into $venv failed; the lines above name the missing package. Fix it and run make sglang again." >&2
  exit 1
}
"$venv/bin/python" agentrl/inference/launch/sglang_main.py --device cpu --help > /dev/null || {
  echo "SGLang is installed in $venv, but does not start; the lines above say why. Fix it and run make sglang again." >&2
  exit 1
}
echo "$wanted" > "$stamp"
