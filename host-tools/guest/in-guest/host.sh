# Sourced in the guest before every check: a Linux host's ways to a target at $ADDR:$PORT, subsystem $NQN.
set -euo pipefail
HOSTNQN=nqn.2014-08.org.nvmexpress:uuid:0f01fb42-9f7f-4856-b0b3-51e60b8de349
HOSTID=0f01fb42-9f7f-4856-b0b3-51e60b8de349
DISCOVERY=nqn.2014-08.org.nvmexpress.discovery
host=(--hostnqn=$HOSTNQN --hostid=$HOSTID)

fail() { echo "FAILED: $*"; exit 1; }

# connect [ARGS]: as a user would, and waits until the controller is live. Without hostnqn and hostid 6.1 says EINVAL.
connect() {
  timeout 60 nvme connect -t tcp -a "$ADDR" -s "$PORT" -n "$NQN" "${host[@]}" "$@"
  controller >/dev/null
}
disconnect() { timeout 60 nvme disconnect -n "$NQN" >/dev/null; }
# Leaves nothing connected, whatever an earlier check left behind.
disconnect_all() {
  local m
  for m in $(awk '$1 ~ /^\/dev\/nvme/ {print $2}' /proc/mounts); do umount -l "$m" || true; done
  timeout 60 nvme disconnect-all >/dev/null 2>&1 || true
}

# controller [NQN] [SECONDS]: the live controller of a subsystem, as /dev/nvmeX
controller() {
  local nqn=${1:-$NQN} i c
  for i in $(seq $((${2:-10} * 5))); do
    for c in /sys/class/nvme/nvme*; do
      [ "$(cat "$c/subsysnqn" 2>/dev/null)" = "$nqn" ] && [ "$(cat "$c/state" 2>/dev/null)" = live ] &&
        { echo "/dev/${c##*/}"; return 0; }
    done
    sleep 0.2
  done
  fail "no live controller of $nqn"
}

# namespace NSID [SECONDS]: the block device of a namespace of $NQN
namespace() {
  local i b
  for i in $(seq $((${2:-10} * 5))); do
    for b in /sys/block/nvme*n*; do
      case ${b##*/} in *c*n*) continue;; esac   # a path of a multipath device
      [ "$(cat "$b/device/subsysnqn" 2>/dev/null)" = "$NQN" ] && [ "$(cat "$b/nsid" 2>/dev/null)" = "$1" ] &&
        [ -b "/dev/${b##*/}" ] && { echo "/dev/${b##*/}"; return 0; }
    done
    sleep 0.2
  done
  fail "no block device of namespace $1 of $NQN"
}

# verify DEVICE NAME ARGS...: fio writes and verifies; a block that differs fails the check
verify() {
  local device=$1 name=$2; shift 2
  fio --name="$name" --filename="$device" --ioengine=libaio --direct=1 --verify=crc32c --verify_fatal=1 --do_verify=1 \
    --random_generator=tausworthe64 --minimal "$@" >/tmp/fio.out 2>&1 || { tail -20 /tmp/fio.out; fail "fio $name"; }
}

# same A B: two files hold the same bytes
same() { cmp "$1" "$2" || fail "$1 and $2 differ"; }
# refused PATTERN COMMAND...: the command fails, and its output says why
refused() {
  local pattern=$1 output; shift
  if output=$("$@" 2>&1); then echo "$output" | tail -5; fail "'$*' was accepted"; fi
  grep -qiE "$pattern" <<<"$output" || { echo "$output" | tail -5; fail "'$*' was refused with other words"; }
}

# The kernel's messages since the last mark, and whether any tells of trouble. `$1`: a pattern of what is expected.
dmesg_mark() { busybox dmesg -c >/dev/null; }
dmesg_clean() {
  local bad
  bad=$(busybox dmesg -r | grep -E '^<[0-3]>|^<4>.*(nvme|I/O|EXT4|XFS|blk|WARNING)|BUG|Call Trace' | grep -vE "${1:-^$}" || true)
  [ -z "$bad" ] || { echo "$bad" | head -8; fail "the kernel complains"; }
}
