#!/bin/bash
# The run @{name}; written by: disttrain train --emit slurm
@{options}
set -euo pipefail

@{setup}
@{exports}
job=@{job}
stop=@{stop}
child=''
again="${SLURM_RESTART_COUNT:-0}"

@{follow}

mapfile -t hosts < <(scontrol show hostnames "$@{nodelist}")
export MASTER_ADDR="${hosts[0]}" MASTER_PORT=@{port}
@{serve}
@{uneven}
@{python} disttrain_cli.runtime.launching.begin "$job" --again "$again"
srun @{group}--ntasks=@{tasks} --distribution=@{distribution} --kill-on-bad-exit=1 \
  @{python} disttrain_cli.runtime.launching.rank "$job" &
child=$!
code=0
follow "$child" || code=$?

if [[ "$code" -eq 0 && -n "$stopping" ]]; then
  echo "Stopped with a checkpoint before the time limit; queued again"
  scontrol requeue "$SLURM_JOB_ID"
elif [[ "$code" -ne 0 && -z "$stopping" && "$again" -lt @{restarts} ]]; then
  echo "Ranks failed (exit code $code); queued again, restart $((again + 1)) of @{restarts}" >&2
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
