//! The shim's functions as C sees them (`csrc/shim.h`). No logic, no ownership: the modules beside this one own.

use std::ffi::{c_char, c_int, c_void};

pub(crate) type LogFn = extern "C" fn(level: u32, bytes: *const c_char, len: usize);
pub(crate) type LcoreFn = extern "C" fn(arg: *mut c_void) -> c_int;
pub(crate) type WalkFn = extern "C" fn(ctx: *mut c_void, object: *mut c_void, index: u32);

unsafe extern "C" {
    pub(crate) fn sluice_version() -> *const c_char;
    pub(crate) fn sluice_max_lcores() -> u32;
    pub(crate) fn sluice_errno() -> c_int;

    pub(crate) fn sluice_log_open(callback: LogFn) -> c_int;
    pub(crate) fn sluice_eal_init(argc: c_int, argv: *mut *mut c_char) -> c_int;

    pub(crate) fn sluice_lcore_launch(entry: LcoreFn, arg: *mut c_void, lcore: u32) -> c_int;
    pub(crate) fn sluice_lcore_is_waiting(lcore: u32) -> c_int;
    pub(crate) fn sluice_lcore_current() -> u32;

    pub(crate) fn sluice_ring_create(name: *const c_char, count: u32) -> *mut c_void;
    pub(crate) fn sluice_ring_free(ring: *mut c_void);
    pub(crate) fn sluice_ring_capacity(ring: *const c_void) -> u32;
    pub(crate) fn sluice_ring_count(ring: *const c_void) -> u32;
    pub(crate) fn sluice_ring_enqueue_burst(ring: *mut c_void, items: *const *mut c_void, n: u32) -> u32;
    pub(crate) fn sluice_ring_dequeue_burst(ring: *mut c_void, items: *mut *mut c_void, n: u32) -> u32;

    pub(crate) fn sluice_mempool_create(name: *const c_char, count: u32, object_bytes: u32) -> *mut c_void;
    pub(crate) fn sluice_mempool_free(pool: *mut c_void);
    pub(crate) fn sluice_mempool_get(pool: *mut c_void, object: *mut *mut c_void) -> c_int;
    pub(crate) fn sluice_mempool_put(pool: *mut c_void, object: *mut c_void);
    pub(crate) fn sluice_mempool_available(pool: *const c_void) -> u32;
    pub(crate) fn sluice_mempool_walk(pool: *mut c_void, callback: WalkFn, ctx: *mut c_void) -> u32;

    pub(crate) fn sluice_zmalloc(name: *const c_char, bytes: usize, align: u32) -> *mut c_void;
    pub(crate) fn sluice_free(memory: *mut c_void);
}
