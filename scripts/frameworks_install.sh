#!/usr/bin/env bash
# Make .frameworks-venv/openai3 and .frameworks-venv/openai2: agent frameworks beside agentrl, as the two requirements files pin
# them. There are two, because LlamaIndex and litellm need openai 2, the OpenAI Agents SDK and pydantic-ai openai 3. Does nothing
# where they are there already. An incomplete installation, or one from other pins or another script, starts again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
need_mb=2500
wait_s=1200

exec 9>> scripts/frameworks_openai3_requirements.txt # nothing is written to it: it is what is locked until this process ends
if ! flock -n 9; then
  echo "Another installation into $(pwd)/.frameworks-venv is under way; waiting up to $wait_s s for it to end" >&2
  flock -w "$wait_s" 9 || {
    echo "It has not ended. End it, or run make test-frameworks again when it is done." >&2
    exit 1
  }
fi
for name in openai3 openai2; do
  venv=.frameworks-venv/$name
  requirements=scripts/frameworks_${name}_requirements.txt
  stamp=$venv/.ready # holds what it was installed from
  wanted=$(cat scripts/frameworks_install.sh "$requirements" | sha256sum)
  if [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then continue; fi
  rm -rf "$venv"
  mkdir -p .frameworks-venv
  have_mb=$(df -Pm . | awk 'NR==2 {print $4}')
  if [ "$have_mb" -lt "$need_mb" ]; then
    echo "$venv needs $need_mb MB of disk, $have_mb MB are free under $(pwd). Free some and run make test-frameworks again." >&2
    exit 1
  fi
  echo "Installing the packages of $requirements into $(pwd)/$venv (some minutes)"
  "$python" -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps -r "$requirements" || {
    echo "Installing $requirements into $venv failed; the lines above name the package. Fix it and run make test-frameworks again." >&2
    exit 1
  }
  "$venv/bin/pip" check --disable-pip-version-check || {
    echo "The pins of $requirements do not fit together; the lines above say which. Fix them and run make test-frameworks again." >&2
    exit 1
  }
  "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --editable . # without torch, which no episode needs
  echo "$wanted" > "$stamp"
done
