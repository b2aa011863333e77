# Samples of the trained model and the verdict, on the first host alone. Nothing is lost if a signal ends this.
if [[ "$code" -eq 0 || -n "$stopped" ]]; then
  stopping="${stopping:-over}"
  @{python} disttrain_cli.mitigation.learned "$job" &
  child=$!
  follow "$child" || true
fi
