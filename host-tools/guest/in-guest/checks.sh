# Sourced in the guest: one function a check. Which run in which order, tests-system/linux_host.rs says.
# $NS4K and $NS512 are the ids of a 4 KiB and a 512 B namespace of $NQN.

discover() {
  nvme discover -t tcp -a "$ADDR" -s "$PORT" "${host[@]}" | tee /tmp/discover
  grep -qE "^subnqn: +$NQN\$" /tmp/discover || fail "$NQN isn't in the discovery log"
  grep -qE '^trtype: +tcp' /tmp/discover; grep -qE '^adrfam: +ipv4' /tmp/discover
  grep -qE "^trsvcid: +$PORT\$" /tmp/discover
}

# H27: the kernel keeps a persistent discovery controller alive with Keep Alive
discover_persistent() {
  dmesg_mark
  nvme discover --persistent -k 2 -t tcp -a "$ADDR" -s "$PORT" "${host[@]}" >/dev/null
  local c; c=$(controller $DISCOVERY)
  sleep 7
  [ "$(cat "/sys/class/nvme/${c##*/}/state")" = live ] || fail "the discovery controller isn't live any more"
  nvme get-log "$c" --log-id=0x70 --log-len=1024 >/dev/null
  dmesg_clean
  nvme disconnect -d "$c"
}

connect_all() {
  timeout 60 nvme connect-all -t tcp -a "$ADDR" -s "$PORT" "${host[@]}"
  controller >/dev/null
  disconnect_all
}

# H45, H47: what the kernel asks for at connect, it gets without an error in its log
connect_quietly() {
  dmesg_mark
  connect -i 4
  local c; c=$(controller)
  [ "$(cat "/sys/class/nvme/${c##*/}/queue_count")" = 5 ] || fail "queue_count $(cat "/sys/class/nvme/${c##*/}/queue_count")"
  [ "$(blockdev --getss "$(namespace "$NS4K")")" = 4096 ] || fail "block size of namespace $NS4K"
  [ "$(blockdev --getss "$(namespace "$NS512")")" = 512 ] || fail "block size of namespace $NS512"
  sleep 1
  dmesg_clean
}

# Every query of nvme-cli that a target must answer.
cli_mandatory() {
  local c n q bad=0; c=$(controller); n=$(namespace "$NS4K")
  while read -r q; do
    # shellcheck disable=SC2086
    if ! timeout 20 nvme $q >/tmp/query 2>&1; then echo "nvme $q: $(tail -2 /tmp/query | tr '\n' ' ')"; bad=1; fi
  done <<END
id-ctrl $c
id-ctrl -H $c
id-ns $n
id-ns -H $n
id-ns $c -n $NS512
ns-descs $n
list
list -v
list-subsys
list-ns $c
list-ns $c --all
list-ctrl $c
get-ns-id $n
nvm-id-ctrl $c
cmdset-ind-id-ns $c -n $NS4K
smart-log $c
smart-log -H $c
error-log $c
fw-log $c
effects-log $c
changed-ns-list-log $c
supported-log-pages $c
show-regs $c
show-regs -H $c
get-log $c --log-id=1 --log-len=64
get-log $c --log-id=2 --log-len=512
get-log $c --log-id=3 --log-len=512
get-log $c --log-id=5 --log-len=4096
get-feature $c -f 0x07
get-feature $c -f 0x0b
get-feature $c -f 0x0f
END
  [ $bad = 0 ] || fail "queries that must be answered"
  nvme id-ctrl "$c" | grep -qE "^subnqn +: $NQN" || fail "subnqn in id-ctrl"
  nvme list | grep -q "^$n " || fail "nvme list lacks $n"
}

# Queries of features that a target may lack: it answers, or refuses with a status; the controller stays live.
cli_optional() {
  local c n q f bad=0 id; c=$(controller); n=$(namespace "$NS4K"); id=$(cat "/sys/class/nvme/${c##*/}/cntlid")
  {
    for f in $(seq 1 31) 120 121 122 125 126 127 128 129 130 131 132 133; do printf 'get-feature %s -f 0x%x\n' "$c" "$f"; printf 'get-feature %s -n %s -f 0x%x\n' "$c" "$NS4K" "$f"; done
    for f in 0 4 6 7 8 9 11 12 13 14 15 16 18 19 112 128 129 192; do printf 'get-log %s --log-id=0x%x --log-len=512\n' "$c" "$f"; done
    cat <<END
telemetry-log $c -o /tmp/telemetry
ana-log $c
endurance-log $c -g 1
self-test-log $c
sanitize-log $c
persistent-event-log $c -a 0 -l 512
predictable-lat-log $c -i 1
lba-status-log $c
resv-notif-log $c
media-unit-stat-log $c
supported-cap-config-log $c
fid-support-effects-log $c
id-iocs $c
id-domain $c
id-nvmset $c
id-ns-granularity $c
id-uuid $c
id-ns-lba-format $c
nvm-id-ns $n
nvm-id-ns-lba-format $c
primary-ctrl-caps $c
list-secondary $c
resv-report $n
get-lba-status $n -s 0 -m 1 -a 0x11 -l 1
get-property $c --offset=0
get-property $c --offset=8
dir-receive $n --dir-type=0 --dir-oper=1 --data-len=64
device-self-test $c -n 1 -s 1
id-ns $c -n 4294967295
id-ns $c -n 4242
get-log $c --log-id=2 --log-len=512 --lpo=4096
END
  } > /tmp/queries
  dmesg_mark
  while read -r q; do
    # shellcheck disable=SC2086
    timeout 20 nvme $q >/tmp/query 2>&1 </dev/null && continue
    [ $? -ne 124 ] || { echo "nvme $q: no answer"; bad=1; continue; }
    grep -qiE 'status|invalid|not supported|unsupported|unrecognized|usage|error|fail' /tmp/query || { echo "nvme $q: $(tail -2 /tmp/query | tr '\n' ' ')"; bad=1; }
  done < /tmp/queries
  [ $bad = 0 ] || fail "queries without a clean answer"
  [ "$(cat "/sys/class/nvme/${c##*/}/state")" = live ] && [ "$(cat "/sys/class/nvme/${c##*/}/cntlid")" = "$id" ] || fail "the controller was lost"
  echo "$(wc -l < /tmp/queries) queries"
  dmesg_clean
}

# Header and data digests on and off, 1 and 4 I/O queues.
digests_and_queues() {
  local queues digests
  disconnect_all; dmesg_mark
  for queues in 1 4; do for digests in "" "-g" "-G" "-g -G"; do
    # shellcheck disable=SC2086
    connect -i $queues $digests
    verify "$(namespace "$NS4K")" "q$queues$digests" --rw=randwrite --bsrange=4k-64k --size=6m --iodepth=16
    disconnect
  done; done
  dmesg_clean
}

# H11: 8 KiB verify with both digests while another job overwrites the neighbouring blocks
digests_under_overwrite() {
  disconnect_all; dmesg_mark; connect -i 4 -g -G
  local n; n=$(namespace "$NS4K")
  fio --name=neighbour --filename="$n" --offset=64m --size=32m --rw=randwrite --bs=4k --iodepth=16 --ioengine=libaio --direct=1 \
    --time_based --runtime=12 --minimal >/tmp/neighbour.out 2>&1 &
  verify "$n" both-digests --rw=randwrite --bs=8k --size=16m --iodepth=128
  wait %1 || fail "the neighbour"
  disconnect; dmesg_clean
}

fio_4k() {
  connect -i 4
  local n; n=$(namespace "$NS4K")
  verify "$n" 4k --rw=randwrite --bs=4k --size=20m --iodepth=32
  verify "$n" to1m --rw=randwrite --bsrange=4k-1m --size=96m --iodepth=16
  verify "$n" 1m --rw=write --bs=1m --size=32m --offset=128m --iodepth=4
  verify "$n" mixed --rw=randrw --bsrange=4k-256k --size=32m --io_size=32m --offset=192m --iodepth=16
  # H10: 64 KiB reads at depth 4
  verify "$n" h10 --rw=randwrite --bs=64k --size=32m --iodepth=4
}

fio_512() {
  local n; n=$(namespace "$NS512")
  verify "$n" 512 --rw=randwrite --bs=512 --size=1m --iodepth=32
  verify "$n" odd --rw=randwrite --bsrange=512-64k --size=16m --iodepth=16
  verify "$n" to1m --rw=randwrite --bsrange=512-1m --size=48m --iodepth=8
}

# Compare, Write Zeroes, Dataset Management, Flush, Verify through nvme-cli, on both block sizes
commands() {
  local id n bs i; dmesg_mark
  for id in "$NS4K" "$NS512"; do
    n=$(namespace "$id"); bs=$(blockdev --getss "$n"); rm -f /tmp/r   # nvme-cli doesn't cut a longer file
    dd if=/dev/urandom of=/tmp/a bs="$bs" count=1 2>/dev/null; dd if=/dev/urandom of=/tmp/b bs="$bs" count=1 2>/dev/null
    dd if=/dev/zero of=/tmp/zero bs="$bs" count=1 2>/dev/null
    for i in 6 7 8; do nvme write "$n" -s $i -c 0 -z "$bs" -d /tmp/a >/dev/null; done
    nvme compare "$n" -s 7 -c 0 -z "$bs" -d /tmp/a >/dev/null
    refused 'compare' nvme compare "$n" -s 7 -c 0 -z "$bs" -d /tmp/b
    nvme verify "$n" -s 0 -c 8 >/dev/null
    nvme flush "$n" >/dev/null
    nvme write-zeroes "$n" -s 7 -c 0 >/dev/null
    nvme read "$n" -s 7 -c 0 -z "$bs" -d /tmp/r >/dev/null; same /tmp/r /tmp/zero
    for i in 6 8; do nvme read "$n" -s $i -c 0 -z "$bs" -d /tmp/r >/dev/null; same /tmp/r /tmp/a; done  # H66
    nvme write-zeroes "$n" -s 6 -c 0 --deac >/dev/null
    nvme read "$n" -s 6 -c 0 -z "$bs" -d /tmp/r >/dev/null; same /tmp/r /tmp/zero
    nvme dsm "$n" --ad --slbs=8 --blocks=1 >/dev/null
    nvme read "$n" -s 8 -c 0 -z "$bs" -d /tmp/r >/dev/null; same /tmp/r /tmp/zero
  done
}

# H17: exactly 2^MDTS pages in one command; H125: the last block, and the one past it
limits() {
  local id n bs nsze mdts bytes
  mdts=$(nvme id-ctrl "$(controller)" | awk '$1 == "mdts" {print $3}')
  [ "$mdts" -gt 0 ] || fail "MDTS is 0: no limit told"
  for id in "$NS4K" "$NS512"; do
    n=$(namespace "$id"); bs=$(blockdev --getss "$n"); nsze=$(($(blockdev --getsize64 "$n") / bs)); bytes=$((4096 << mdts))
    if [ $((bytes / 1024)) -le "$(cat "/sys/block/${n##*/}/queue/max_hw_sectors_kb")" ]; then
      dd if=/dev/urandom of=/tmp/a bs=$bytes count=1 iflag=fullblock 2>/dev/null
      nvme write "$n" -s 0 -c $((bytes / bs - 1)) -z $bytes -d /tmp/a >/dev/null
      nvme read "$n" -s 0 -c $((bytes / bs - 1)) -z $bytes -d /tmp/r >/dev/null; same /tmp/r /tmp/a
    fi
    dd if=/dev/urandom of=/tmp/a bs="$bs" count=1 2>/dev/null
    rm -f /tmp/r
    nvme write "$n" -s $((nsze - 1)) -c 0 -z "$bs" -d /tmp/a >/dev/null
    nvme read "$n" -s $((nsze - 1)) -c 0 -z "$bs" -d /tmp/r >/dev/null; same /tmp/r /tmp/a
    truncate -s $((2 * bs)) /tmp/two
    refused 'LBA.*range' nvme read "$n" -s "$nsze" -c 0 -z "$bs" -d /tmp/r
    refused 'LBA.*range' nvme write "$n" -s $((nsze - 1)) -c 1 -z $((2 * bs)) -d /tmp/two
  done
}

# H164: what is discarded reads as zeroes, what isn't keeps its data
discard() {
  local n; n=$(namespace "$NS4K")
  verify "$n" before --rw=write --bs=64k --size=8m --iodepth=8
  dd if="$n" of=/tmp/before bs=1M count=8 iflag=direct 2>/dev/null
  blkdiscard -o 2M -l 2M "$n"; blkdiscard -z -o 6M -l 1M "$n"
  dd if=/dev/zero of=/tmp/before bs=1M seek=2 count=2 conv=notrunc 2>/dev/null
  dd if=/dev/zero of=/tmp/before bs=1M seek=6 count=1 conv=notrunc 2>/dev/null
  dd if="$n" of=/tmp/after bs=1M count=8 iflag=direct 2>/dev/null
  same /tmp/before /tmp/after
  blkdiscard "$n"   # H62: the whole device
  dd if="$n" bs=1M count=8 iflag=direct 2>/dev/null | cmp -n $((8 << 20)) - /dev/zero
}

# filesystem TYPE NSID: files copied, compared after a cold remount, trimmed; fsck finds nothing
filesystem() {
  local type=$1 n; n=$(namespace "$2"); dmesg_mark
  case $type in ext4) mkfs.ext4 -q -F "$n";; xfs) mkfs.xfs -q -f "$n";; esac
  mkdir -p /mnt/x; mount -t "$type" "$n" /mnt/x
  cp -r /usr/sbin /usr/bin /mnt/x/; rm -r /mnt/x/sbin; cp -r /usr/sbin /mnt/x/again
  (cd /usr/sbin; find . -type f | sort | xargs md5sum) > /tmp/sbin.sums
  (cd /usr/bin; find . -type f | sort | xargs md5sum) > /tmp/bin.sums
  sync; fstrim /mnt/x
  umount /mnt/x; echo 3 > /proc/sys/vm/drop_caches; mount -t "$type" "$n" /mnt/x
  (cd /mnt/x/again; md5sum -c --quiet /tmp/sbin.sums); (cd /mnt/x/bin; md5sum -c --quiet /tmp/bin.sums)
  echo "$(cat /tmp/sbin.sums /tmp/bin.sums | wc -l) files identical"
  umount /mnt/x
  case $type in ext4) e2fsck -fn "$n" >/tmp/fsck 2>&1;; xfs) xfs_repair -n "$n" >/tmp/fsck 2>&1;; esac || { tail -5 /tmp/fsck; fail "fsck"; }
  dmesg_clean
}

reconnect_loop() {
  local i; disconnect_all; dmesg_mark
  for i in 1 2 3 4 5; do connect -i $((i % 4 + 1)); dd if="$(namespace "$NS4K")" of=/dev/null bs=64k count=4 iflag=direct 2>/dev/null; disconnect; done
  connect -i 4; nvme reset "$(controller)"; controller >/dev/null
  dd if="$(namespace "$NS4K")" of=/dev/null bs=64k count=4 iflag=direct 2>/dev/null
  dmesg_clean 'resetting controller'
}

# H25: a short keep-alive timeout under the heaviest load that this host can make
keep_alive_under_load() {
  disconnect_all; dmesg_mark; connect -i 4 -k 5
  local n c id; n=$(namespace "$NS4K"); c=$(controller); id=$(cat "/sys/class/nvme/${c##*/}/cntlid")
  fio --name=load --filename="$n" --size=128m --rw=randwrite --bs=128k --iodepth=64 --numjobs=4 --group_reporting --ioengine=libaio \
    --direct=1 --time_based --runtime=15 --minimal >/tmp/fio.out 2>&1 || { tail -3 /tmp/fio.out; fail "fio"; }
  sleep 7   # idle: now the timer alone keeps it
  [ "$(cat "/sys/class/nvme/${c##*/}/cntlid")" = "$id" ] || fail "the controller was lost"
  # The kernel tells of a slow answer from a quarter of the timeout on; half of it is the limit.
  dmesg_clean 'long keepalive RTT \(([0-9]{3}|1[0-9]{3}|2[0-4][0-9]{2}) ms\)'
  disconnect
}

# size_becomes NSID BYTES SECONDS: a changed size shows by itself (asynchronous event)
size_becomes() {
  local n i; n=$(namespace "$1")
  for i in $(seq $(($3 * 5))); do [ "$(blockdev --getsize64 "$n")" = "$2" ] && return 0; sleep 0.2; done
  fail "$n is still $(blockdev --getsize64 "$n") bytes"
}
namespace_gone() {
  local i; for i in $(seq $(($2 * 5))); do (namespace "$1" 0 >/dev/null 2>&1) || { ls /sys/block | grep -q . ; return 0; }; sleep 0.2; done
  fail "namespace $1 is still there"
}

# Files written one after the other, each synced before its checksum is noted: what must be there after any outage.
ext4_writer() {
  local n i end; n=$(namespace "$NS4K"); end=$((SECONDS + $1))
  mkfs.ext4 -q -F "$n"; mkdir -p /mnt/w; mount "$n" /mnt/w; : > /tmp/synced
  echo writing
  for i in $(seq 100000); do
    [ $SECONDS -lt $end ] || break
    dd if=/dev/urandom of=/mnt/w/f$i bs=$((4096 + i % 7 * 9000)) count=3 conv=fsync 2>/dev/null || fail "write of f$i"
    md5sum /mnt/w/f$i >> /tmp/synced
  done
  echo "$(wc -l < /tmp/synced) files"
}
# snapshot_check SNAPSHOT CLONE: namespaces that were made of the writer's while it wrote, after /tmp/before was written.
snapshot_check() {
  local s c; s=$(namespace "$1" 5); c=$(namespace "$2" 5)
  [ "$(blockdev --getro "$s")" = 1 ] || fail "the snapshot isn't read-only"
  ! dd if=/dev/zero of="$s" bs=4k count=1 oflag=direct 2>/dev/null || fail "the snapshot was written to"
  dd if="$s" of=/tmp/start bs=1M count=4 iflag=direct 2>/dev/null
  mkdir -p /mnt/c; mount "$c" /mnt/c
  sed 's,/mnt/w,/mnt/c,' /tmp/before > /tmp/there; md5sum -c --quiet /tmp/there || fail "files that were there before differ"
  rm -r /mnt/c/f*; umount /mnt/c; e2fsck -fn "$c" >/tmp/fsck 2>&1 || { tail -5 /tmp/fsck; fail "fsck"; }
  dd if="$s" bs=1M count=4 iflag=direct 2>/dev/null | cmp - /tmp/start || fail "the snapshot has changed"
  echo "$(wc -l < /tmp/there) files of before the snapshot, $(wc -l < /tmp/synced) in all"
}
ext4_writer_check() {
  local n; n=$(namespace "$NS4K" 30)
  grep -q ' /mnt/w ext4 rw' /proc/mounts || fail "no longer mounted read-write"
  touch /mnt/w/still-here; sync; echo 3 > /proc/sys/vm/drop_caches
  md5sum -c --quiet /tmp/synced || fail "files differ"
  umount /mnt/w; e2fsck -fn "$n" >/tmp/fsck 2>&1 || { tail -5 /tmp/fsck; fail "fsck"; }
  # Losing the connection is what was asked for; an I/O error is not.
  dmesg_clean 'no usable path - requeuing I/O|callbacks suppressed|nvme nvme[0-9]+: (queue|starting error recovery|failed nvme_keep|Reconnecting|Failed reconnect|failed to connect|failed to send|keep-alive|Property Set|rescan|I/O tag|Successfully|sending|receive failed|Connect command failed|socket error|.*timeout|Abort|failed to receive)'
}

# Blocks written one after the other (direct, so complete when dd returns), each noted on the machine's share at once
# Block i holds its own number in every 8 bytes; the machine reads the note after the plug is pulled.
block_writer() {
  local n i; n=$(namespace "$NS4K")
  # Made before the load: under emulation every further process costs.
  awk 'BEGIN { for (i = 0; i < 1000; i++) for (j = 0; j < 256; j++) printf "block%011d", i }' > /tmp/blocks
  fio --name=load --filename="$n" --offset=256m --size=64m --rw=randwrite --bs=64k --iodepth=32 --ioengine=libaio --direct=1 \
    --time_based --runtime=600 --minimal >/dev/null 2>&1 &
  for i in $(seq 0 999); do
    dd if=/tmp/blocks of="$n" bs=4096 skip="$i" seek="$i" count=1 oflag=direct conv=notrunc 2>/dev/null || fail "write of block $i"
    echo "$i"
  done
  sleep 600
}
