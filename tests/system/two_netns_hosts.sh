#!/usr/bin/env bash
# Two hosts as network namespaces of this machine, host-a and host-b, joined by a link:
#
#   two_netns_hosts.sh start DIR   # then jaxspeed launch --hostfile DIR/hosts --ssh DIR/ssh ...
#   two_netns_hosts.sh cut DIR     # the link is gone, nobody is told
#   two_netns_hosts.sh stop DIR
#
# It needs root. DIR/ssh takes a host and a command as ssh does.
set -euo pipefail
what=$1
dir=$(mkdir -p "$2" && cd "$2" && pwd)
id=$(printf "%s" "$dir" | md5sum | head -c 6)
a=jx-a-$id
b=jx-b-$id

start() {
  ip netns add "$a"
  ip netns add "$b"
  ip -n "$a" link add link0 type veth peer name link0 netns "$b"
  ip -n "$a" address add 10.231.7.1/24 dev link0
  ip -n "$b" address add 10.231.7.2/24 dev link0
  for host in "$a" "$b"; do
    ip -n "$host" link set lo up
    ip -n "$host" link set link0 up
    mkdir -p "/etc/netns/$host" # laid over /etc by `ip netns exec`
    printf '127.0.0.1 localhost\n10.231.7.1 host-a\n10.231.7.2 host-b\n' > "/etc/netns/$host/hosts"
  done
  printf 'host-a slots=1\nhost-b slots=1\n' > "$dir/hosts"
  cat > "$dir/ssh" <<RUN
#!/bin/sh
[ "\$1" = -- ] && shift
name=jx-\${1#host-}-$id
exec ip netns exec "\$name" unshare --uts sh -c 'hostname "\$0"; exec sh -c "\$1"' "\$1" "\$2"
RUN
  chmod +x "$dir/ssh"
}

cut() {
  ip -n "$a" link set link0 down
}

stop() {
  ip netns del "$a" || true
  ip netns del "$b" || true
  rm -rf "/etc/netns/$a" "/etc/netns/$b"
}

"$what"
