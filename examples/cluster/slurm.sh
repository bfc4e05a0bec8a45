#!/bin/bash
# 4 machines with 8 GPUs each: sbatch slurm.sh
#
# Slurm starts one launcher per machine. If a worker fails, the launchers start all workers again. If a
# machine is lost, Slurm queues the job again. Submit the script again to continue after the time
# limit. With IMAGE, the launchers run in containers, for which Slurm needs the plugin pyxis:
#
#   sbatch --export=ALL,IMAGE=registry.example#train:1 slurm.sh
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=16
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

SCRIPT=train.py # in the folder in which you call sbatch, which all machines must see
container=()
if [[ -n ${IMAGE:-} ]]; then
    SCRIPT=/app/train.py
    container=(--container-image="$IMAGE" --container-mounts="$SLURM_SUBMIT_DIR:$SLURM_SUBMIT_DIR")
fi

MASTER=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
# srun hands the environment to all machines. Nobody else knows the token.
DISTRIBUTARY_TOKEN=$(openssl rand -hex 16)
export SCRIPT MASTER DISTRIBUTARY_TOKEN

# Since Slurm 22.05, srun does not take --cpus-per-task from sbatch.
# SLURM_NODEID differs between the machines, so a shell on each of them reads it.
# shellcheck disable=SC2016
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 "${container[@]}" bash -c '
    exec distributary launch \
        --nnodes "$SLURM_NNODES" \
        --node-rank "$SLURM_NODEID" \
        --master "$MASTER:$((20000 + SLURM_JOB_ID % 10000))" \
        --max-restarts 3 \
        --grace-seconds 20 \
        "$SCRIPT" --checkpoints "$SLURM_SUBMIT_DIR/checkpoints"
'
