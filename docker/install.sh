#!/usr/bin/env bash
# Install agentrl from a checkout into an environment of its own, as the image does. Usage: docker/install.sh PREFIX
# TORCH_INDEX: an index of torch builds, such as the one for CPUs; EXTRAS: extras of agentrl, separated by commas.
set -euo pipefail
repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
prefix=${1:?"usage: docker/install.sh PREFIX"}
"${PYTHON:-python3}" -m venv "$prefix"
pip=("$prefix/bin/pip" install --quiet --no-cache-dir --disable-pip-version-check -c "$repository/constraints.txt")
"${pip[@]}" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
"${pip[@]}" "$repository${EXTRAS:+[$EXTRAS]}"
"$prefix/bin/agentrl" --version
