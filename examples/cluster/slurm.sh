#!/bin/bash
# A run on two nodes with eight GPUs each: sbatch examples/cluster/slurm.sh run.yaml
# The trainer has all sixteen GPUs; the servers are those of inference.urls in the run file.
#SBATCH --job-name=agentrl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
set -euo pipefail

run_file=$1
port=29600
# The address of this node, on which the driver runs, as the other nodes reach it.
driver=$(hostname -I | awk '{print $1}')
# The secret goes through the environment, which srun passes on: not into a file or onto a command line.
AGENTRL_CLUSTER_TOKEN=$(openssl rand -hex 32)
export AGENTRL_CLUSTER_TOKEN

# The trainer ranks wait for the driver. A rank that ends with an error starts again and joins again.
srun --kill-on-bad-exit=0 --output='trainer-%t.log' bash -c \
  "trap : TERM; until python -m agentrl.trainer.worker.process --attach $driver:$port; do sleep 5; done" &

trap : TERM # the driver gets it too, and ends the run with its last checkpoint
agentrl train "$run_file" \
  --cluster.launcher attach --cluster.listen "$driver:$port" \
  --trainer.parallel.dp auto
wait
