# Sourced in the guest, after block.sh, for the power cuts: the service on six slices of one disk, whose every write dm-log-writes
# keeps in order. What is done with the log afterwards stands in tests-system/power_cuts.rs.

# power_members FIRST SECTORS: six slices of the disk under the log, SECTORS each, the first one from FIRST
power_members() {
  local m i size; for m in virtio_blk dm-mod dm-log-writes dm-flakey dm-delay; do modprobe $m; done
  mkdir -p $SERVICE; cp -r /job/programs /tmp/; cp /job/config.toml $SERVICE/
  # Without a cache that it has to flush, the log would not tell what a power cut can lose.
  [ "$(cat "$(queue "$(disk members)" write_cache)")" = "write back" ] || fail "the disk has no write cache"
  size=$(blockdev --getsz "$(disk members)")
  dm create written --table "0 $size log-writes $(disk members) $(disk log)"
  # A flush takes along what any slice had written. So flushes must not overtake each other on their way to the log and the disk,
  # or a slice's write would seem to come after its own flush: this lets one thread submit them all, one after the other.
  dm create ordered --table "0 $size delay /dev/mapper/written 0 0 /dev/mapper/written 0 0 /dev/mapper/written 0 1"
  # dm-flakey that is never down, not dm-linear: its flushes carry the sector where the slice begins, so the log tells whose they are.
  for i in 0 1 2 3 4 5; do dm create member$i --table "0 $2 flakey /dev/mapper/ordered $(($1 + i * $2)) 60 0"; done
}

# mark WORD: what is in the log by now had become durable when WORD was said
mark() { dmsetup --noudevrules --noudevsync message written 0 mark "$1"; }
# marks: says again and again how long the hosts' journals are: what was acknowledged in there is in the log already
marks() {
  local sizes
  while [ -e $SERVICE/marking ]; do
    sizes=$(stat -c %s "$SERVICE/journal$NS4K" "$SERVICE/journal$NS512")
    mark "acknowledged:${sizes/$'\n'/:}"
    sleep 0.1
  done
}

# loads SECONDS: both block sizes are written to, each write in a journal; ends early with the service
loads() {
  local nsid; pids=()
  for nsid in "$NS4K" "$NS512"; do
    host verify --nsid "$nsid" -z 20MiB -b 32KiB --journal "$SERVICE/journal$nsid" --time "$1" -i 1 --queue-depth 8 --random-percent 60 \
      --zeroes-percent 4 --deallocate-percent 4 > "$SERVICE/host$nsid" 2>&1 & pids+=($!)
  done
}
loads_end() { local pid; for pid in "${pids[@]}"; do wait "$pid" || { cat $SERVICE/host*; fail "a host ended with an error"; }; done; }
journals_hold() {
  local nsid
  for nsid in "$NS4K" "$NS512"; do host verify --nsid "$nsid" -z 20MiB -b 32KiB --check-journal "$SERVICE/journal$nsid"; done
}

# A load through checkpoints and cleaning, with a clean stop and a kill -9 in it, and a clean stop at its end.
power_load() {
  local pid marker round
  service_up
  loads 1; loads_end   # both journals are there now
  touch $SERVICE/marking; marks & marker=$!
  mark serving
  loads "$1"; loads_end
  ctl pool show > /job/first.json
  mark stopping; service_stop; service_up; mark started
  loads "$1"; sleep "$(($1 / 2))"; mark killing; service_kill
  for pid in "${pids[@]}"; do wait "$pid" || true; done
  service_up; mark recovered
  journals_hold
  for round in 1 2 3 4 5; do
    loads "$1"; loads_end
    ctl pool show > /job/last.json
    # Without cleaning the load is worth little.
    ! grep -qE '"segments_cleaned": *[1-9]' /job/*.json || break
    [ $round != 5 ] || { cat /job/*.json; fail "nothing was cleaned"; }
  done
  mark stopping; service_stop
  rm $SERVICE/marking; wait $marker
  mark "acknowledged:$(stat -c %s "$SERVICE/journal$NS4K"):$(stat -c %s "$SERVICE/journal$NS512")"
  ! grep -E '"(read_errors|write_errors|timeouts|checksum_errors)": *[1-9]' /job/*.json || fail "errors on healthy members"
  cp $SERVICE/pool.key "$SERVICE/journal$NS4K" "$SERVICE/journal$NS512" $SERVICE/log /job/
}
# Ends the log: its superblock tells how long it is.
power_off() {
  local i
  for i in 0 1 2 3 4 5; do dm remove member$i; done
  dm remove ordered; dm remove written
  blockdev --flushbufs "$(disk log)"; sync
}
