# Ranks that were stopped have said what asked for it, once their checkpoint was written.
stopped=''
if [[ -s @{stopped} ]]; then
  stopped="$(< @{stopped})" code=143
  if [[ "$stopped" == SIGINT ]]; then code=130; fi
  echo "Stopped by $stopped, with a checkpoint"
fi
