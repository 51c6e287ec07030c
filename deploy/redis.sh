#!/bin/sh
# Starts Redis with the users of users.acl, confined to one namespace, each with its password.
#
#   redis.sh USERS FOLDER [option of redis-server]...
#
# USERS is users.acl; FOLDER, for the copy that Redis reads, keeps nothing that is needed later.
# KVROUTE_NAMESPACE is `default` unless set; `*`: all. WORKER_PASSWORD, ROUTER_PASSWORD and
# OPERATOR_PASSWORD must be set; the copy has only their hashes. Connections that are idle for 300 s
# are closed, as nobody needs a password to open them.
set -eu
users=$1 copy=$2/users.acl
shift 2
umask 077
sed "s|{\*|{${KVROUTE_NAMESPACE:-default}|g" "$users" >"$copy"
for role in worker router operator; do
    variable=$(echo "${role}_PASSWORD" | tr a-z A-Z)
    password=$(printenv "$variable") || password=
    [ -n "$password" ] || { echo "redis.sh: $variable is not set" >&2; exit 1; }
    hash=$(printf %s "$password" | sha256sum | cut -d ' ' -f 1)
    sed "s|^user kvroute-$role on resetpass|& #$hash|" "$copy" >"$copy.new"
    mv "$copy.new" "$copy"
done
exec redis-server --aclfile "$copy" --timeout 300 "$@"
