/* The C side of sdk-bindings: what is a macro, an inline function or a variadic in DPDK becomes a plain function here.
 * It holds no state but the log callback, and no policy. Every signature is mirrored in src/ffi.rs. */
#ifndef SLUICE_SHIM_H
#define SLUICE_SHIM_H

#include <stddef.h>
#include <stdint.h>

typedef void (*sluice_log_fn)(uint32_t level, const char *bytes, size_t len);
typedef int (*sluice_lcore_fn)(void *arg);

const char *sluice_version(void);
uint32_t sluice_max_lcores(void);
int sluice_errno(void);
const char *sluice_strerror(int errnum);

/* EAL. Returns 0, or the negated errno. */
int sluice_log_open(sluice_log_fn fn);
int sluice_eal_init(int argc, char **argv);

/* lcores */
int sluice_lcore_launch(sluice_lcore_fn fn, void *arg, uint32_t lcore);
int sluice_lcore_is_waiting(uint32_t lcore);
uint32_t sluice_lcore_current(void); /* UINT32_MAX on a thread that EAL doesn't know */

/* rings: one producer, one consumer, pointers */
void *sluice_ring_create(const char *name, uint32_t count);
void sluice_ring_free(void *ring);
uint32_t sluice_ring_capacity(const void *ring);
uint32_t sluice_ring_count(const void *ring);
uint32_t sluice_ring_enqueue_burst(void *ring, void *const *items, uint32_t n);
uint32_t sluice_ring_dequeue_burst(void *ring, void **items, uint32_t n);

/* mempools of equal objects; any thread may take and give */
void *sluice_mempool_create(const char *name, uint32_t count, uint32_t object_bytes);
void sluice_mempool_free(void *pool);
int sluice_mempool_get(void *pool, void **object);
void sluice_mempool_put(void *pool, void *object);
uint32_t sluice_mempool_available(const void *pool);
uint32_t sluice_mempool_walk(void *pool, void (*fn)(void *ctx, void *object, uint32_t index), void *ctx);

/* memory from EAL's heap */
void *sluice_zmalloc(const char *name, size_t bytes, uint32_t align);
void sluice_free(void *memory);

#endif
