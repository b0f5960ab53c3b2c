#!/usr/bin/env bash
# Make .clients-venv/openai3, .clients-venv/openai2 and .clients-node: the clients that `make test-clients` runs against an episode's
# door, as the two requirements files and clients_node/package-lock.json pin them. There are two virtual environments, because litellm
# needs openai 2. Does nothing where they are there already; an incomplete installation, or one from other pins, starts again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
need_mb=4000
wait_s=1200

exec 9>> scripts/clients_openai3_requirements.txt # nothing is written to it: it is what is locked until this process ends
if ! flock -n 9; then
  echo "Another installation of clients into $(pwd) is under way; waiting up to $wait_s s for it to end" >&2
  flock -w "$wait_s" 9 || {
    echo "It has not ended. End it, or run make test-clients again when it is done." >&2
    exit 1
  }
fi

fresh() { # whether the folder $1 was installed by this script from the files that follow
  local folder=$1
  shift
  wanted=$(cat scripts/clients_install.sh "$@" | sha256sum)
  if [ -e "$folder/.ready" ] && [ "$(cat "$folder/.ready")" = "$wanted" ]; then return 0; fi
  rm -rf "$folder"
  have_mb=$(df -Pm . | awk 'NR==2 {print $4}')
  if [ "$have_mb" -lt "$need_mb" ]; then
    echo "$folder needs up to $need_mb MB of disk, $have_mb MB are free under $(pwd). Free some and run make test-clients again." >&2
    exit 1
  fi
  echo "Installing clients into $(pwd)/$folder (some minutes)"
  mkdir -p "$folder"
  return 1
}

for name in openai3 openai2; do
  venv=.clients-venv/$name
  requirements=scripts/clients_${name}_requirements.txt
  if fresh "$venv" "$requirements"; then continue; fi
  "$python" -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps -r "$requirements" || {
    echo "Installing $requirements into $venv failed; the lines above name the package. Fix it and run make test-clients again." >&2
    exit 1
  }
  "$venv/bin/pip" check --disable-pip-version-check || {
    echo "The pins of $requirements do not fit together; the lines above say which. Fix them and run make test-clients again." >&2
    exit 1
  }
  echo "$wanted" > "$venv/.ready"
done

command -v npm > /dev/null || {
  echo "make test-clients needs Node.js 20 or newer with npm, for Codex, Claude Code, opencode, pi and the AI SDK. Install it." >&2
  exit 1
}
pins=scripts/clients_node
if ! fresh .clients-node "$pins/package.json" "$pins/package-lock.json"; then
  cp "$pins/package.json" "$pins/package-lock.json" .clients-node
  # not `npm ci`, which refuses a lock file without the programs of other platforms
  npm install --prefix .clients-node --no-audit --no-fund --loglevel error || {
    echo "Installing $pins into .clients-node failed; the lines above name the package. Fix it and run make test-clients again." >&2
    exit 1
  }
  echo "$wanted" > .clients-node/.ready
fi
