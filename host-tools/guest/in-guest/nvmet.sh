# Sourced in the guest by the self-test: the kernel's own NVMe/TCP target (known good), to tell the harness's faults from
# the target's. nvmet_up NQN ADDRESS PORT SIZE_MIB
nvmet_up() {
  modprobe nvmet; modprobe nvmet-tcp; modprobe null_blk nr_devices=0
  local block=/sys/kernel/config/nullb/n0 target=/sys/kernel/config/nvmet device
  mkdir -p $block; echo 1 > $block/memory_backed; echo "$4" > $block/size; echo 512 > $block/blocksize; echo 0 > $block/irqmode
  echo 1 > $block/discard; echo 1 > $block/power
  device=/dev/n0; [ -b $device ] || device=/dev/nullb$(cat $block/index)
  mkdir -p "$target/subsystems/$1/namespaces/1"; echo 1 > "$target/subsystems/$1/attr_allow_any_host"
  echo -n $device > "$target/subsystems/$1/namespaces/1/device_path"; echo 1 > "$target/subsystems/$1/namespaces/1/enable"
  mkdir -p $target/ports/1; echo ipv4 > $target/ports/1/addr_adrfam; echo tcp > $target/ports/1/addr_trtype
  echo "$2" > $target/ports/1/addr_traddr; echo "$3" > $target/ports/1/addr_trsvcid
  ln -s "$target/subsystems/$1" "$target/ports/1/subsystems/$1"
}
