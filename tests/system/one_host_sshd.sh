#!/usr/bin/env bash
# An sshd on this machine's loopback addresses, of Debian's openssh-server:
#
#   one_host_sshd.sh start DIR    # then ssh -F DIR/ssh_config 127.0.0.1 ...
#   one_host_sshd.sh stop DIR
#
# All of its files are in DIR, keys too; it lets in the user who starts it.
set -euo pipefail
what=$1
dir=$(mkdir -p "$2" && cd "$2" && pwd)

stop() {
  [ -f "$dir/sshd.pid" ] && kill "$(cat "$dir/sshd.pid")" 2>/dev/null || true
}

start() {
  local port
  port=$(shuf --input-range=20000-29999 --head-count=1)
  ssh-keygen -q -t ed25519 -N '' -f "$dir/host_key"
  ssh-keygen -q -t ed25519 -N '' -f "$dir/key"
  cp "$dir/key.pub" "$dir/authorized_keys"
  [ "$(id -u)" = 0 ] && mkdir -p /run/sshd
  cat > "$dir/sshd_config" <<CONF
Port $port
ListenAddress 127.0.0.1
ListenAddress 127.0.0.2
HostKey $dir/host_key
AuthorizedKeysFile $dir/authorized_keys
PidFile $dir/sshd.pid
StrictModes no
UsePAM no
PasswordAuthentication no
CONF
  cat > "$dir/ssh_config" <<CONF
Host *
  Port $port
  IdentityFile $dir/key
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
CONF
  "$(command -v sshd || echo /usr/sbin/sshd)" -f "$dir/sshd_config" -E "$dir/sshd.log"
  for _ in $(seq 50); do
    ssh -F "$dir/ssh_config" -o BatchMode=yes 127.0.0.2 true 2>/dev/null && return
    sleep 0.1
  done
  cat "$dir/sshd.log" >&2
  stop
  return 1
}

"$what"
