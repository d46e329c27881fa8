//! Host-side tools: the user-space NVMe/TCP host and the bench.
