/* See shim.h. Compiles against DPDK 22.11 and 24.11. */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <stdio.h>

#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_launch.h>
#include <rte_lcore.h>
#include <rte_log.h>
#include <rte_malloc.h>
#include <rte_mempool.h>
#include <rte_ring.h>
#include <rte_version.h>

static sluice_log_fn log_fn;

static ssize_t log_write(void *cookie, const char *bytes, size_t len)
{
	int level = rte_log_cur_msg_loglevel();

	(void)cookie;
	if (log_fn != NULL)
		log_fn(level < 0 ? RTE_LOG_INFO : (uint32_t)level, bytes, len);
	return (ssize_t)len;
}

const char *sluice_version(void)
{
	return rte_version();
}

uint32_t sluice_max_lcores(void)
{
	return RTE_MAX_LCORE;
}

int sluice_errno(void)
{
	return rte_errno;
}

const char *sluice_strerror(int errnum)
{
	return rte_strerror(errnum);
}

/* EAL writes each message by one vfprintf and a flush; line buffering hands whole lines to the callback. */
int sluice_log_open(sluice_log_fn fn)
{
	cookie_io_functions_t io = { .write = log_write };
	FILE *stream = fopencookie(NULL, "w", io);

	if (stream == NULL)
		return -errno;
	setvbuf(stream, NULL, _IOLBF, BUFSIZ);
	log_fn = fn;
	return rte_openlog_stream(stream) == 0 ? 0 : -EINVAL;
}

int sluice_eal_init(int argc, char **argv)
{
	if (rte_eal_init(argc, argv) >= 0)
		return 0;
	return rte_errno > 0 ? -rte_errno : -EINVAL;
}

int sluice_lcore_launch(sluice_lcore_fn fn, void *arg, uint32_t lcore)
{
	if (lcore >= RTE_MAX_LCORE || !rte_lcore_is_enabled(lcore) || lcore == rte_get_main_lcore())
		return -EINVAL;
	return rte_eal_remote_launch(fn, arg, lcore);
}

int sluice_lcore_is_waiting(uint32_t lcore)
{
	return lcore < RTE_MAX_LCORE && rte_eal_get_lcore_state(lcore) == WAIT;
}

uint32_t sluice_lcore_current(void)
{
	unsigned int lcore = rte_lcore_id();

	return lcore == LCORE_ID_ANY ? UINT32_MAX : lcore;
}

void *sluice_ring_create(const char *name, uint32_t count)
{
	return rte_ring_create(name, count, SOCKET_ID_ANY, RING_F_SP_ENQ | RING_F_SC_DEQ | RING_F_EXACT_SZ);
}

void sluice_ring_free(void *ring)
{
	rte_ring_free(ring);
}

uint32_t sluice_ring_capacity(const void *ring)
{
	return rte_ring_get_capacity(ring);
}

uint32_t sluice_ring_count(const void *ring)
{
	return rte_ring_count(ring);
}

uint32_t sluice_ring_enqueue_burst(void *ring, void *const *items, uint32_t n)
{
	return rte_ring_sp_enqueue_burst(ring, items, n, NULL);
}

uint32_t sluice_ring_dequeue_burst(void *ring, void **items, uint32_t n)
{
	return rte_ring_sc_dequeue_burst(ring, items, n, NULL);
}

/* ring_mt_rts: a thread that is preempted in the middle of a get or put doesn't make the others spin
 * (rte_ring's relaxed tail sync). No per-lcore cache: what is free is free for every lcore. */
void *sluice_mempool_create(const char *name, uint32_t count, uint32_t object_bytes)
{
	struct rte_mempool *pool;
	int ret;

	pool = rte_mempool_create_empty(name, count, object_bytes, 0, 0, SOCKET_ID_ANY, RTE_MEMPOOL_F_NO_IOVA_CONTIG);
	if (pool == NULL)
		return NULL;
	ret = rte_mempool_set_ops_byname(pool, "ring_mt_rts", NULL);
	if (ret == 0)
		ret = rte_mempool_populate_default(pool);
	if (ret < 0 || (uint32_t)ret != count) {
		rte_mempool_free(pool);
		rte_errno = ret < 0 ? -ret : ENOMEM;
		return NULL;
	}
	return pool;
}

void sluice_mempool_free(void *pool)
{
	rte_mempool_free(pool);
}

int sluice_mempool_get(void *pool, void **object)
{
	return rte_mempool_get(pool, object);
}

void sluice_mempool_put(void *pool, void *object)
{
	rte_mempool_put(pool, object);
}

uint32_t sluice_mempool_available(const void *pool)
{
	return rte_mempool_avail_count(pool);
}

struct walk {
	void (*fn)(void *ctx, void *object, uint32_t index);
	void *ctx;
};

static void walk_one(struct rte_mempool *pool, void *opaque, void *object, unsigned int index)
{
	struct walk *walk = opaque;

	(void)pool;
	walk->fn(walk->ctx, object, index);
}

uint32_t sluice_mempool_walk(void *pool, void (*fn)(void *ctx, void *object, uint32_t index), void *ctx)
{
	struct walk walk = { .fn = fn, .ctx = ctx };

	return rte_mempool_obj_iter(pool, walk_one, &walk);
}

void *sluice_zmalloc(const char *name, size_t bytes, uint32_t align)
{
	return rte_zmalloc(name, bytes, align);
}

void sluice_free(void *memory)
{
	rte_free(memory);
}
