#!/bin/sh
# Replaces the engines and API servers of a running compose.yaml one by one by containers of the present image and settings.
# An engine hands its requests over to the others, an API server finishes its streams, each within its stop_grace_period.
set -eu

for service in engine api; do
  for container in $(docker compose ps --quiet "$service"); do
    docker rm "$(docker stop "$container")" > /dev/null
    docker compose up --detach --wait --no-deps --no-recreate "$service"
  done
done
