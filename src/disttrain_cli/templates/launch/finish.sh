# Samples of the trained model and the verdict, on the first host alone. Nothing is lost if a signal ends this. A job
# that a scheduler stopped, which starts again, must end within its grace period.
if [[ "$code" -eq 0 || "$stopped" == "stop file" || "$stopped" == SIGINT ]]; then
  stopping="${stopping:-over}"
  @{python} disttrain_cli.mitigation.learned "$job" &
  child=$!
  follow "$child" || true
fi
