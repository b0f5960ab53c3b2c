#!/usr/bin/env bash
# What a new user does in the first hour, in twelve commands: install, write an agent, test it, train it, look at the run.
# Usage: bash scripts/first_hour.sh [FOLDER]; about five minutes on two idle cores, most of it installation.
set -euo pipefail
repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
folder="${1:-$(mktemp -d)}"
mkdir -p "$folder" && cd "$folder"
count=0
run() {
  count=$((count + 1))
  echo "[$count] $*"
  "$@"
}

run python3 -m venv venv
run venv/bin/pip install --quiet -c "$repository/constraints.txt" torch==2.13.0 pytest
run venv/bin/pip install --quiet -c "$repository/constraints.txt" "$repository"
run venv/bin/agentrl init my-agent
export PATH="$folder/venv/bin:$PATH"
cd my-agent
run pytest -q
run agentrl doctor run.yaml
run agentrl train run.yaml --dry-run
run agentrl train run.yaml
run agentrl eval run.yaml --greedy --checkpoint runs/my-agent/checkpoints/step-000100
run agentrl view runs/my-agent --html episode.html
run agentrl rescore runs/my-agent --limit 20
run agentrl chat runs/my-agent/checkpoints/step-000100 <<< "What is one plus one?"
echo "$count commands; the best episode is in $PWD/episode.html, and the whole run in: agentrl view runs/my-agent"
