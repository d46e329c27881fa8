# Sourced in the guest for the checks of `block:` members: devices of odd shapes, the service on them, its life and death.
# The programs lie in /job/programs; the disks are told apart by their serials.

SERVICE=/tmp/service
export LD_LIBRARY_PATH=/tmp/programs

# disk SERIAL: a virtio disk
disk() {
  local b
  for b in /sys/block/vd*; do [ "$(cat "$b/serial" 2>/dev/null)" != "$1" ] || { echo "/dev/${b##*/}"; return 0; }; done
  fail "no disk $1"
}
# queue DEVICE LIMIT: where the kernel shows one of the device's queue limits
queue() { echo "/sys/dev/block/$((0x$(stat -Lc %t "$1"))):$((0x$(stat -Lc %T "$1")))/queue/$2"; }
# is DEVICE LIMIT VALUE: the case that is tested is there
is() { local now; now=$(cat "$(queue "$1" "$2")"); [ "$now" = "$3" ] || fail "$2 of $1 is $now, not $3"; }
dm() { dmsetup --noudevrules --noudevsync "$@" && dmsetup mknodes; }

# The six members: a plain disk; one of 4 KiB sectors; one whose optimal I/O is 11 pages; a stripe of three disks in 64 KiB
# (a boundary each 128 blocks); a part that begins at an odd sector and takes 64 KiB at once; a loop device.
block_disks() {
  local m size; for m in virtio_blk dm-mod loop; do modprobe $m; done
  mkdir -p $SERVICE; cp -r /job/programs /tmp/
  is "$(disk sectors)" logical_block_size 4096
  is "$(disk optimal)" optimal_io_size 45056
  size=$(blockdev --getsz "$(disk stripe0)")
  dm create stripe --table "0 $((3 * size)) striped 3 128 $(disk stripe0) 0 $(disk stripe1) 0 $(disk stripe2) 0"
  is /dev/mapper/stripe optimal_io_size 196608
  size=$(blockdev --getsz "$(disk shifted)")
  dm create shifted --table "0 $((size - 1)) linear $(disk shifted) 1"
  echo 64 > "$(queue /dev/mapper/shifted max_sectors_kb)"
  is /dev/mapper/shifted max_sectors_kb 64
  truncate -s 192M /tmp/looped; losetup /dev/loop0 /tmp/looped
  cat > $SERVICE/config.toml <<END
[service]
socket = "$SERVICE/control.sock"
[reactors]
count = 1
hugepages = "off"
[buffers]
memory = "64MiB"
[limits]
hosts = 4
queues = 4
[pool]
k = 4
m = 2
members = ["block:$(disk plain)", "block:$(disk sectors)", "block:$(disk optimal)", "block:/dev/mapper/stripe",
  "block:/dev/mapper/shifted", "block:/dev/loop0"]
segment_size = "1MiB"
# Under emulation beside other work even a healthy disk can be slow.
member_timeout_ms = 30000
map_memory = "32MiB"
key_file = "$SERVICE/pool.key"
[[volume]]
name = "v4k"
size = "1GiB"
[[volume]]
name = "v512"
size = "256MiB"
block_size = 512
[[subsystem]]
nqn = "$NQN"
allow_any_host = true
[[subsystem.namespace]]
nsid = $NS4K
backend = "pool:v4k"
[[subsystem.namespace]]
nsid = $NS512
backend = "pool:v512"
[[listener]]
address = "$ADDR"
port = $PORT
END
}

# Starts the service and waits until it serves.
service_up() {
  local i
  : > $SERVICE/out
  setsid /tmp/programs/offload-svc --config $SERVICE/config.toml > $SERVICE/out 2>> $SERVICE/log < /dev/null &
  echo $! > $SERVICE/pid
  for i in $(seq 600); do
    grep -q 'nvme connect' $SERVICE/out && return 0
    kill -0 "$(cat $SERVICE/pid)" 2>/dev/null || { tail -6 $SERVICE/log; fail "the service ended at its start"; }
    sleep 0.2
  done
  tail -6 $SERVICE/log; fail "the service isn't up"
}
# gone: the service's process has ended
gone() {
  local i
  for i in $(seq 300); do kill -0 "$(cat $SERVICE/pid)" 2>/dev/null || return 0; sleep 0.2; done
  fail "the service still runs"
}
service_kill() { kill -9 "$(cat $SERVICE/pid)"; gone; }
service_stop() { kill -TERM "$(cat $SERVICE/pid)"; gone; grep -q 'stopped' $SERVICE/log || { tail -6 $SERVICE/log; fail "no clean stop"; }; }

ctl() { /tmp/programs/offloadctl --socket $SERVICE/control.sock --json "$@"; }
# members_are COUNT: so many members are active, and none has an error
members_are() {
  local shown; shown=$(ctl pool show)
  [ "$(grep -oE '"state": *"active"' <<<"$shown" | wc -l)" = "$1" ] || { echo "$shown"; fail "not $1 active members"; }
}
unharmed() {
  members_are 6
  ctl pool show > $SERVICE/show
  ! grep -E '"(read_errors|write_errors|timeouts|checksum_errors)": *[1-9]' $SERVICE/show || fail "errors on healthy members"
}
host() { local verb=$1; shift; timeout 300 /tmp/programs/nvmf "$verb" -t tcp -a "$ADDR" -s "$PORT" -n "$NQN" "$@"; }

# H108: a file system, and copies in units of 4 KiB and 1 MiB, through a pool on such members.
odd_members_carry_a_file_system() {
  local n b
  connect -i 2; n=$(namespace "$NS4K"); dmesg_mark
  mkfs.ext4 -q -F "$n"; mkdir -p /mnt/x; mount "$n" /mnt/x
  dd if=/dev/urandom of=/tmp/noise bs=1M count=8 2>/dev/null
  for b in 4k 1M; do dd if=/tmp/noise of=/mnt/x/$b bs=$b oflag=direct 2>/dev/null; done
  umount /mnt/x; echo 3 > /proc/sys/vm/drop_caches; mount "$n" /mnt/x
  for b in 4k 1M; do same /tmp/noise /mnt/x/$b; done
  umount /mnt/x; e2fsck -fn "$n" > /tmp/fsck 2>&1 || { tail -5 /tmp/fsck; fail "fsck"; }
  n=$(namespace "$NS512")
  verify "$n" mixed --rw=randwrite --bsrange=512-256k --size=8m --iodepth=8
  disconnect; dmesg_clean; unharmed
}

# kill -9 in the middle of a load on both block sizes: what was acknowledged is there.
killed_again_and_again() {
  local pause pids pid nsid
  for pause in 3 5 2 8; do
    pids=()
    for nsid in "$NS4K" "$NS512"; do
      host verify --nsid "$nsid" -z 24MiB -b 16KiB --journal "$SERVICE/journal$nsid" --time 60 -i 1 --zeroes-percent 5 \
        --deallocate-percent 5 > "$SERVICE/host$nsid" 2>&1 & pids+=($!)
    done
    sleep "$pause"; service_kill
    for pid in "${pids[@]}"; do wait "$pid" || true; done
    service_up
    for nsid in "$NS4K" "$NS512"; do
      host verify --nsid "$nsid" -z 24MiB -b 16KiB --check-journal "$SERVICE/journal$nsid" || fail "kill -9 after $pause s"
    done
    ctl pool show | grep -qE '"kind": *"recovered"' || fail "the mount was no recovery"
    unharmed
  done
  wc -c "$SERVICE"/journal*
}

stopped_and_started() {
  host verify --nsid "$NS4K" -z 16MiB --seed 5
  service_stop; service_up
  ctl pool show | grep -qE '"kind": *"clean"' || fail "the mount wasn't clean"
  host verify --nsid "$NS4K" -z 16MiB --seed 5 --check-only
  unharmed
}

# DPDK's memory in hugepages, by demand; too few of them stop the start with the command that helps.
in_hugepages() {
  service_stop
  sed -i 's/hugepages = "off"/hugepages = "on"/' $SERVICE/config.toml
  ! /tmp/programs/offload-svc --config $SERVICE/config.toml > $SERVICE/out 2> $SERVICE/refused || fail "it starts without hugepages"
  grep -q 'run `sysctl -w vm.nr_hugepages=' $SERVICE/refused || { tail -3 $SERVICE/refused; fail "no advice"; }
  echo "$(grep -oE 'nr_hugepages=[0-9]+' $SERVICE/refused | grep -oE '[0-9]+')" > /proc/sys/vm/nr_hugepages
  service_up
  grep -q 'platform="DPDK .*, hugepages"' $SERVICE/log || fail "not in hugepages"
  [ "$(sed -n 's/^HugePages_Free: *//p' /proc/meminfo)" -lt "$(sed -n 's/^HugePages_Total: *//p' /proc/meminfo)" ] || fail "none is used"
  host verify --nsid "$NS4K" -z 16MiB --seed 5 --check-only
  host verify --nsid "$NS4K" -z 16MiB --seed 5
  unharmed
}

# Two devices answer with errors from now on: reads and writes go on.
two_devices_err() {
  local name
  for name in stripe shifted; do
    dm suspend --noflush --nolockfs $name
    dm load $name --table "0 $(blockdev --getsz /dev/mapper/$name) error"; dm resume $name
  done
  host verify --nsid "$NS4K" -z 16MiB --seed 5 --check-only
  host verify --nsid "$NS4K" -z 16MiB --seed 6
  members_are 4
  service_kill; service_up
  host verify --nsid "$NS4K" -z 16MiB --seed 6 --check-only
}
