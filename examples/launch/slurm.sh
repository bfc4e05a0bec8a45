#!/bin/bash
# A job on 4 machines of a Slurm cluster: sbatch slurm.sh
#
# Slurm starts one launcher per machine; the launchers start, watch and restart the workers. Slurm
# sends TERM to all processes when the time is up, and KILL after KillWait seconds (30 by default).
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=04:00:00
set -euo pipefail

MASTER=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# srun hands the environment to all machines. Nobody else knows the token.
DISTRIBUTARY_TOKEN=$(openssl rand -hex 16)
export MASTER DISTRIBUTARY_TOKEN

# SLURM_NODEID differs between the machines, so a shell on each of them reads it.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 bash -c '
    exec distributary launch \
        --nnodes "$SLURM_NNODES" \
        --node-rank "$SLURM_NODEID" \
        --master "$MASTER:$((20000 + SLURM_JOB_ID % 10000))" \
        --max-restarts 3 \
        --grace-seconds 20 \
        train.py --checkpoints "$SLURM_SUBMIT_DIR/checkpoints"
'
