#!/usr/bin/env bash
# initramfs.sh VERSION: builds the guest's initramfs for a kernel in the cache and prints the paths of kernel and initramfs.
#
# busybox, this machine's own nvme-cli, fio, dmsetup, mkfs and fsck with their libraries, the modules that an NVMe/TCP host
# (and the kernel's own target, for the self-test) and odd block devices need, and in-guest/. It is built again whenever any of those changed: its name
# holds a hash of them all.
set -euo pipefail; trap 'echo "initramfs.sh: line $LINENO failed" >&2' ERR
here=$(dirname "$(readlink -f "$0")"); . "$here/cache.sh"
version=$1; tree=$SLUICE_GUEST_CACHE/kernels/$version
[ -e "$tree/complete" ] || { echo "initramfs.sh: no kernel $version in the cache; run $here/kernels.sh $version" >&2; exit 1; }
kernel=$(ls "$tree"/boot/vmlinuz-*); kver=$(basename "$kernel"); kver=${kver#vmlinuz-}

MODULES="virtio_pci virtio_net virtio_blk virtio_console 9p 9pnet_virtio configfs nvme-core nvme-auth nvme-keyring
  nvme-fabrics nvme-tcp nvmet nvmet-tcp null_blk dm-mod dm-log-writes dm-flakey dm-delay loop ext4 xfs crc32c_generic crc32c-intel crc32-pclmul tls"
COMMANDS="bash mount umount nvme fio mkfs.xfs xfs_repair mkfs.ext4 e2fsck fstrim blkdiscard blockdev lsblk ip kmod
  timeout setsid dmsetup dd cmp head md5sum od tr sync stat strace"
OPTIONAL="strace"

key=$( { cat "$0" "$here"/in-guest/{init,agent}.sh; cat "$tree/complete"; for c in $COMMANDS; do stat -Lc '%n %s %Y' "$(command -v "$c")" 2>/dev/null || true; done; } | sha256sum | cut -c1-16)
out=$SLUICE_GUEST_CACHE/initramfs-$version-$key.cpio
if [ -e "$out" ]; then touch "$out"; echo "$kernel $out"; exit 0; fi

w=$(mktemp -d "$SLUICE_GUEST_CACHE/initramfs.XXXXXX"); trap 'rm -rf "$w"' EXIT
root=$w/root
mkdir -p "$root"/{usr/bin,usr/sbin,usr/lib,usr/lib64,proc,sys,dev,tmp,run,etc/nvme,root,job,mnt,rig} "$root/usr/lib/modules/$kver"
for d in bin sbin lib lib64; do ln -s "usr/$d" "$root/$d"; done
add() { # a file at its own path, with its libraries
  local f=$1 real library; real=$(readlink -f "$f")
  [ -e "$root$f" ] || install -D -m 755 "$real" "$root$f"
  { ldd "$real" 2>/dev/null || true; } | { grep -oE '/[^ ]+' || true; } | while read -r library; do
    [ -e "$root$library" ] || install -D -m 755 "$(readlink -f "$library")" "$root$library"; done
}
add "$(command -v busybox)"; ln -sf busybox "$root/usr/bin/sh"
for c in $COMMANDS; do
  path=$(command -v "$c" || true)
  if [ -n "$path" ]; then case $path in /bin/*|/sbin/*) path=/usr$path;; esac; add "$path"; continue; fi
  case " $OPTIONAL " in *" $c "*) ;; *) echo "initramfs.sh: no $c on this machine (see host-tools/setup/packages.sh test)" >&2; exit 1;; esac
done
for k in modprobe insmod rmmod lsmod depmod; do ln -sf ../bin/kmod "$root/usr/sbin/$k"; done
libgcc=$(ldconfig -p | awk '/libgcc_s.so.1.*x86-64/ {path = $NF} END {print path}'); [ -z "$libgcc" ] || add "$libgcc"   # pthread_cancel loads it late

modules_from=$w/modules-root; mkdir -p "$modules_from"
if [ -d "$tree/lib/modules" ]; then ln -s "$tree/lib" "$modules_from/lib"; else ln -s "$tree/usr/lib" "$modules_from/lib"; fi
[ -e "$modules_from/lib/modules/$kver/modules.dep" ] || depmod -b "$modules_from" "$kver"
for m in $MODULES; do modprobe -d "$modules_from" -S "$kver" --show-depends "$m" 2>/dev/null || true; done |
  awk '$1 == "insmod" {print $2}' | sort -u | while read -r file; do
    dst=$root/usr/lib/modules/$kver/${file#*"/modules/$kver/"}; mkdir -p "$(dirname "$dst")"
    case $file in *.xz) xz -dc "$file" > "${dst%.xz}";; *.zst) zstd -dcq "$file" > "${dst%.zst}";; *) cp "$file" "$dst";; esac
  done
cp "$modules_from/lib/modules/$kver"/modules.{builtin,builtin.modinfo,order} "$root/usr/lib/modules/$kver/"
depmod -b "$root" "$kver"
for m in nvme-tcp ext4 xfs 9p; do
  modprobe -d "$root" -S "$kver" --show-depends "$m" >/dev/null 2>&1 || { echo "initramfs.sh: kernel $kver has no module $m" >&2; exit 1; }
done

printf 'root:x:0:0:root:/root:/bin/bash\n' > "$root/etc/passwd"; printf 'root:x:0:\n' > "$root/etc/group"
printf '127.0.0.1 localhost guest\n::1 localhost\n' > "$root/etc/hosts"; printf 'hosts: files\n' > "$root/etc/nsswitch.conf"
[ ! -e /etc/mke2fs.conf ] || cp /etc/mke2fs.conf "$root/etc/"
cp "$here/in-guest/agent.sh" "$root/rig/"; install -m 755 "$here/in-guest/init.sh" "$root/init"
(cd "$root" && find . -print0 | cpio --null -o -H newc --quiet) > "$w/cpio"
mv "$w/cpio" "$out"
find "$SLUICE_GUEST_CACHE" -maxdepth 1 -name "initramfs-$version-*.cpio" -mtime +2 -delete
echo "$kernel $out"
