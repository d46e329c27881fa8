#!/usr/bin/env bash
# packages.sh GROUP...: makes sure that the system packages of each group (build, demo, test) are there.
#
# On Debian 12 (and later) it installs what is missing through apt, naming every package before it does, with sudo where
# it isn't root. On another distribution it names what is missing and stops. When nothing is missing it prints nothing and
# costs one dpkg-query (so there is no stamp that could be wrong).
set -euo pipefail

declare -A GROUPS_OF=(
  # A linker and C compiler for Rust and the DPDK shim; DPDK itself, its headers and what finds them; git for the history.
  [build]="gcc g++ make pkg-config libdpdk-dev"
  # What the demo's script calls beside our own binaries.
  [demo]="procps util-linux grep coreutils"
  # The guest (a real Linux NVMe host in QEMU) and the FUSE member of the system tests.
  [test]="qemu-system-x86 busybox-static kmod cpio xz-utils zstd nvme-cli fio e2fsprogs xfsprogs iproute2 dmsetup
          util-linux procps fuse3 debian-archive-keyring"
)

[ $# -gt 0 ] || { sed -n 2,8p "$0"; exit 2; }
wanted=()
for group in "$@"; do
  [ -n "${GROUPS_OF[$group]:-}" ] || { echo "packages.sh: no group '$group' (there are: ${!GROUPS_OF[*]})" >&2; exit 2; }
  # shellcheck disable=SC2206 # the lists are words
  wanted+=(${GROUPS_OF[$group]})
done

if ! command -v dpkg-query >/dev/null; then
  # Not a Debian: judge by the commands and the one library that the build looks for.
  missing=()
  for command in cc make pkg-config; do command -v $command >/dev/null || missing+=("$command"); done
  pkg-config --exists libdpdk 2>/dev/null || missing+=("DPDK 22.11 or later with pkg-config files")
  case " $* " in *" test "*)
    for command in qemu-system-x86_64 busybox modprobe cpio xz zstd nvme fio mkfs.ext4 mkfs.xfs dmsetup ip fusermount3 apt-get; do
      command -v $command >/dev/null || missing+=("$command")
    done;;
  esac
  [ ${#missing[@]} -eq 0 ] && exit 0
  printf 'This is not Debian, so nothing is installed. Missing: %s\n' "$(printf '%s; ' "${missing[@]}")" >&2
  echo "On Debian 12 they are in: ${wanted[*]}" >&2
  exit 1
fi

missing=()
for package in $(printf '%s\n' "${wanted[@]}" | sort -u); do
  status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$status" = installed ] || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

. /etc/os-release
if [ "${ID:-}" != debian ] || [ "${VERSION_ID:-0}" -lt 12 ]; then
  echo "This is ${PRETTY_NAME:-not Debian 12}, so nothing is installed. Missing packages (Debian's names): ${missing[*]}" >&2
  exit 1
fi
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "Missing packages, and neither root nor sudo here. As root: apt-get install ${missing[*]}" >&2; exit 1; }
  as_root=(sudo)
fi

echo "Installing through apt: ${missing[*]}"
apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::Retries=5 -o DPkg::Lock::Timeout=300 -qq)
# A third-party source that doesn't answer must not stop the set-up: what counts is whether the packages come.
for attempt in 1 2 3; do
  "${apt[@]}" update </dev/null || echo "packages.sh: apt-get update reported errors, going on" >&2
  if "${apt[@]}" -y --no-install-recommends install "${missing[@]}" </dev/null >/dev/null; then exit 0; fi
  echo "packages.sh: attempt $attempt failed" >&2
  sleep $((attempt * 5))
done
echo "packages.sh: apt could not install: ${missing[*]}" >&2
exit 1
