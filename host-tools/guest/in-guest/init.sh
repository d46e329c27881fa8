#!/bin/busybox sh
# PID 1 of the guest: mounts, modules, network; then /rig/agent.sh answers on the virtio console until it is told to stop.
/bin/busybox --install -s /usr/bin 2>/dev/null      # only fills names that the real tools do not have
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
ln -sf /proc/self/fd /dev/fd
mkdir -p /dev/pts /dev/shm; mount -t devpts devpts /dev/pts; mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /tmp; mount -t tmpfs tmpfs /run
cmdline() { sed -n "s/.*\brig\.$1=\([^ ]*\).*/\1/p" /proc/cmdline; }
for m in virtio_pci virtio_console virtio_net 9pnet_virtio 9p configfs nvme-tcp ext4 xfs; do modprobe $m; done
mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144 job /job
ulimit -n 65536
hostname guest
ip link set lo up
for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do [ -e /sys/class/net/eth0 ] && break; sleep 0.2; done
mtu=$(cmdline mtu); [ -z "$mtu" ] || ip link set eth0 mtu "$mtu"
ip link set eth0 up; ip addr add "$(cmdline ip)" dev eth0
gateway=$(cmdline gw); [ -z "$gateway" ] || ip route add default via "$gateway"
mount -t configfs configfs /sys/kernel/config
cd /job && setsid /bin/bash /rig/agent.sh
poweroff -f
