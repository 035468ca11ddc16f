#!/bin/bash
# One process on each node; the processes find each other by the variables that srun sets. Submit
# this with sbatch from the project's folder, with its environment active: sbatch hands on what is
# exported, secrets too.
#SBATCH --job-name=@{name}
#SBATCH --nodes=@{nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
@{options}
set -euo pipefail

# The run refuses to start where fewer processes are.
export GRPO_EQX_REQUIRE_PROCESSES=@{nodes}
export PYTHONUNBUFFERED=1

# At the time limit Slurm signals this shell too, which waits for the tasks to save.
trap : TERM
code=0
srun --nodes=@{nodes} --ntasks=@{nodes} --ntasks-per-node=1 --kill-on-bad-exit=1 --label \
    @{command} || code=$?
@{after}
