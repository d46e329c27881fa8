#!/usr/bin/env bash
# kernels.sh [VERSION...]: fetches Debian's kernels for the guest, 6.1 (bookworm) and 6.12 (trixie), into the cache.
#
# They come through apt with package lists of their own, signed as ever: the machine's apt sources stay as they are, and no
# root is needed. A kernel that is in the cache already is left alone; a half-fetched one is never mistaken for a whole one.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")"); . "$here/cache.sh"
declare -A SUITE=([6.1]=bookworm [6.12]=trixie)
[ $# -gt 0 ] || set -- 6.1 6.12

absent=()
for version in "$@"; do
  [ -n "${SUITE[$version]:-}" ] || { echo "kernels.sh: no kernel '$version' (there are: ${!SUITE[*]})" >&2; exit 2; }
  [ -e "$SLUICE_GUEST_CACHE/kernels/$version/complete" ] || absent+=("$version")
done
[ ${#absent[@]} -gt 0 ] || exit 0

mirror=$( { grep -rhoE 'https?://[^ ]*/debian/?( |$)' /etc/apt/sources.list /etc/apt/sources.list.d/ 2>/dev/null || true; } | head -1 | tr -d ' ')
mirror=${mirror:-http://deb.debian.org/debian}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
[ -e $keyring ] || { echo "kernels.sh: $keyring is not there (package debian-archive-keyring)" >&2; exit 1; }

fetch() { # VERSION: downloads and unpacks one kernel
  local version=$1 suite=${SUITE[$1]} root=$SLUICE_GUEST_CACHE/apt-${SUITE[$1]} work dest=$SLUICE_GUEST_CACHE/kernels/$1
  mkdir -p "$root/lists/partial" "$root/cache/archives/partial" "$SLUICE_GUEST_CACHE/kernels"
  echo "deb [signed-by=$keyring] $mirror $suite main" > "$root/sources.list"
  local options=(-o Dir::Etc::sourcelist="$root/sources.list" -o Dir::Etc::sourceparts=/dev/null
    -o Dir::Etc::preferences=/dev/null -o Dir::Etc::preferencesparts=/dev/null
    -o Dir::State::Lists="$root/lists" -o Dir::Cache="$root/cache" -o APT::Architectures=amd64 -o APT::Architecture=amd64
    -o APT::Sandbox::User="$(id -un)" -o Acquire::Retries=5 -o Acquire::Languages=none -o Debug::NoLocking=1)
  apt-get "${options[@]}" -qq update
  local image
  image=$(apt-cache "${options[@]}" depends linux-image-amd64 | grep -oE 'linux-image-[0-9][^ ]*-amd64' | sort -V | tail -1)
  [ -n "$image" ] || { echo "kernels.sh: $suite names no kernel image" >&2; return 1; }
  work=$(mktemp -d "$SLUICE_GUEST_CACHE/fetch.XXXXXX")
  ( cd "$work" && apt-get "${options[@]}" -qq download "$image" && mkdir tree && dpkg-deb -x ./*.deb tree ) || { rm -rf "$work"; return 1; }
  rm -rf "$dest"; mv "$work/tree" "$dest"; rm -rf "$work" "$root"
  echo "$image" > "$dest/complete"
  echo "guest kernel $version: $image"
}

for version in "${absent[@]}"; do
  for attempt in 1 2 3; do
    fetch "$version" && continue 2
    echo "kernels.sh: fetching $version failed (attempt $attempt)" >&2; sleep $((attempt * 5))
  done
  echo "kernels.sh: could not fetch kernel $version from $mirror" >&2; exit 1
done
