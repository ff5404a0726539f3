#!/bin/sh
# Starts Redis with one user a role, each with the keys and commands that its role needs and no more (keys: engine/bus/keys.py).
# Passwords come from the environment. A client without one may say PING only, for the health check.
set -eu
umask 077

model='headrace:{*}'
ledger="~$model:requests ~$model:order ~$model:live ~$model:ended ~$model:load ~$model:usage ~$model:record:* ~$model:external:*"
ledger="$ledger ~$model:tombstone:* ~$model:resume:* ~$model:orphans ~$model:output:* ~$model:kept ~$model:externals ~$model:fair"
ledger="$ledger ~$model:heights ~$model:takers ~$model:deadlines ~$model:staged ~$model:idempotency:*"
# Scripts name these among their keys, and Redis takes what a script names for what it writes.
slots="~$model:owner:* ~$model:slot:* ~$model:slots ~$model:incarnation ~$model:served ~$model:served:* ~$model:engine ~$model:absent:*"
commands='+@read +@write +@stream +@pubsub +@transaction +@connection +eval +evalsha -@admin -@dangerous +info +time +script|load'

data=${REDIS_DATA:-/data}
cat > "$data/users.acl" <<ACL
user default off
user health on nopass +ping
user admin on >$REDIS_ADMIN_PASSWORD ~* &* +@all
user api on >$REDIS_API_PASSWORD &headrace:* $commands $ledger ~$model:control:* ~headrace:api:* ~headrace:apis $slots %R~$model:tokenizer:* %R~$model:journal:* %R~$model:usage:* %R~$model:alarms %R~headrace:models
user engine on >$REDIS_ENGINE_PASSWORD &headrace:* $commands $ledger ~$model:control:* $slots ~$model:claim:* ~$model:progress:* ~$model:shares ~$model:asked ~$model:journal:* ~$model:journals ~$model:tokenizer:* ~$model:alarms ~headrace:models
user maintenance on >$REDIS_MAINTENANCE_PASSWORD &headrace:* $commands $ledger ~$model:control:* ~$model:usage:* ~$model:journal:* ~$model:journals $slots %R~headrace:models ~headrace:api:* ~headrace:apis ~headrace:absent:* ~headrace:celery:*
ACL

# The public image's entry point gives /data to the user redis and goes on as that user.
if command -v docker-entrypoint.sh > /dev/null; then set -- docker-entrypoint.sh redis-server "$@"; else set -- redis-server "$@"; fi
exec "$@" --dir "$data" --aclfile "$data/users.acl" --appendonly yes --appendfsync everysec --save '' --maxmemory-policy noeviction
