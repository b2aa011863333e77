# Nodes with different numbers of ranks: srun places them by a list with one line per rank.
SLURM_HOSTFILE="$stop.hosts" place=0
for count in @{counts}; do
  for ((number = 0; number < count; number++)); do echo "${hosts[place]}"; done
  place=$((place + 1))
done > "$SLURM_HOSTFILE"
export SLURM_HOSTFILE
