#!/usr/bin/env bash
# Installs the engines of containers that tests run against, docker, podman and gVisor, from the system's packages where they
# are missing, and makes the image of their containers from the packages of this machine, without a network.
# Without them nothing but their tests is lost. So this never fails, and says what to do; as root the tests of what is missing
# then fail, and for other users they are skipped.
set -u
images=${AGENTRL_TEST_IMAGES:-${XDG_CACHE_HOME:-$HOME/.cache}/agentrl/containers}
packages=()
want() { command -v "$1" >/dev/null || [ -x "/usr/sbin/$1" ] || packages+=("${2:-$1}"); }
want dockerd docker.io; want podman; want crun; want runc; want conmon; want runsc
# What the bundled terminal tasks need in the image.
want git; want python3; want ps procps; want make; want jq; want sqlite3; want file; want xz xz-utils; want zip; want unzip
install() { apt-get install -y --no-install-recommends "${packages[@]}"; }
if ! command -v apt-get >/dev/null; then
  echo "docker and podman: no apt-get here; install them with this system's package manager, for the tests of containers"
  exit 0
fi
if [ ${#packages[@]} -gt 0 ]; then
  if [ "$(id -u)" != 0 ]; then
    echo "missing: ${packages[*]}; only root can install them: 'apt-get install ${packages[*]}'; the tests of containers are skipped"
    exit 0
  fi
  # The daemon of the package does not start: tests start one of their own.
  if ! { RUNLEVEL=1 install || { apt-get update && RUNLEVEL=1 install; }; } >/dev/null 2>&1; then
    echo "'apt-get install ${packages[*]}' failed; the tests of containers fail without them"
    exit 0
  fi
fi
python3 "$(dirname "$0")/containers_image.py" "$images" >/dev/null || echo "no image was made in $images; the tests of containers fail without it"
exit 0
