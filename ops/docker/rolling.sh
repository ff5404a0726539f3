#!/bin/sh
# Replaces the engines and API servers of a running compose.yaml one by one by containers of the present image and settings.
# An engine hands its requests over to the others, an API server finishes its streams, each within its stop_grace_period.
set -eu

start() {
  docker compose up --detach --wait --no-deps --no-recreate "$@"
}

for service in engine api; do
  # shellcheck disable=SC2046
  set -- $(docker compose ps --quiet "$service")
  if [ $# = 1 ]; then # nothing goes on without it: its successor starts beside it
    start --scale "$service=2" "$service"
  fi
  for container in "$@"; do
    docker rm "$(docker stop "$container")" > /dev/null
    start "$service"
  done
done
