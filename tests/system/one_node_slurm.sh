#!/usr/bin/env bash
# A SLURM of one node on this machine, of Debian's slurmctld, slurmd, slurm-client and munge:
#
#   one_node_slurm.sh start DIR    # then SLURM_CONF=DIR/slurm.conf srun -n 2 ...
#   one_node_slurm.sh stop DIR
#
# All of its files are in DIR; it needs root, as slurmd does.
set -euo pipefail
what=$1
dir=$(mkdir -p "$2" && cd "$2" && pwd)

stop() {
  for name in slurmd slurmctld munged; do
    [ -f "$dir/$name.pid" ] && kill "$(cat "$dir/$name.pid")" 2>/dev/null || true
  done
}

start() {
  local host port
  host=$(hostname -s)
  port=$(shuf --input-range=20000-29999 --head-count=1)
  mkdir -p "$dir/state" "$dir/spool"
  head -c 128 /dev/urandom > "$dir/munge.key"
  chmod 600 "$dir/munge.key"
  # --force: the folders above DIR may be writable by others.
  munged --force --key-file="$dir/munge.key" --socket="$dir/munge.socket" \
    --pid-file="$dir/munged.pid" --log-file="$dir/munged.log" --seed-file="$dir/munge.seed"
  cat > "$dir/slurm.conf" <<CONF
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket
SlurmctldPort=$port
SlurmdPort=$((port + 1))
# JAX takes its port from the number of the job, and others may run these tests too.
FirstJobId=$port
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=10
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE OverSubscribe=FORCE
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
CONF
  slurmctld -f "$dir/slurm.conf" -c
  slurmd -f "$dir/slurm.conf" -c
  export SLURM_CONF=$dir/slurm.conf
  for _ in $(seq 60); do
    sinfo --noheader --format=%T 2>/dev/null | grep -q idle && return
    sleep 0.5
  done
  tail -n 5 "$dir"/*.log >&2
  stop
  return 1
}

"$what"
