# Sourced: where the guest's kernels and images are kept between runs. SLUICE_GUEST_CACHE overrides it.
SLUICE_GUEST_CACHE=${SLUICE_GUEST_CACHE:-${XDG_CACHE_HOME:-${HOME:-/var/tmp}/.cache}/sluice/guest}
mkdir -p "$SLUICE_GUEST_CACHE"
