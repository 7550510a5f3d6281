/* The threads of all forwards of a process, in two pools: one for what decodes, one for what drafts beside it.
 *
 * A job is a sequence of phases that every thread walks through by itself. A phase is a number of pieces; threads claim
 * them one by one, each its own range first, then what others have not begun. The results of a piece stay private until
 * its thread commits them. A thread that is late with a piece, because the system has given its core to another
 * process, loses the piece: somebody else computes it again and commits it, and the late thread finds that out before it
 * writes. So a phase ends when its work is done, not when its threads are, and each piece is committed exactly once.
 * Which thread computes a piece changes no bit of it.
 *
 * Threads wait by spinning for a bounded time, then asleep.
 */
#ifndef PARLAY_POOL_H
#define PARLAY_POOL_H

#include <stddef.h>
#include <stdint.h>

/* For loops that wait for another thread. */
#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ __volatile__("yield")
#else
#define PAUSE() (void)0
#endif

#define MOST_PIECES 8192 /* of a phase */
#define MOST_THREADS 256 /* of a pool */

enum { DECODING, BESIDE, POOLS };

/* One thread at work on a job. */
typedef struct {
    struct Pool *pool;
    int64_t index, count; /* which of how many */
    uint64_t job, stamp;  /* the job it works on, and the phase that it comes to next */
    char *private;        /* results of a piece until they are committed */
    size_t private_bytes;
} Member;

/* `compute` leaves its results in the member's private memory, `commit` moves them to where all see them. */
typedef struct {
    int64_t pieces;
    void (*compute)(const void *task, int64_t piece, Member *me); /* or null: all of a piece is done by `commit` */
    void (*commit)(const void *task, int64_t piece, Member *me);
    void (*close)(const void *task); /* once, after the last piece and before any thread goes on; or null */
    const void *task;
    int detached; /* `compute` reads no memory but what lives until `parlay_pool_rest`: a late thread is left behind */
} Phase;

/* Runs `job` on `threads` threads of a pool, the caller among them. Any thread may call it; the jobs of a pool run one
 * after another, those of two pools at the same time. */
void parlay_pool_run(int which, int64_t threads, void (*job)(const void *context, Member *me), const void *context);

/* Walks through the next phase. Returns 0 when the job has ended meanwhile: then the thread must leave it at once. */
int parlay_pool_phase(Member *me, const Phase *phase);

/* At least so many bytes of private memory, aligned to 64; what was in it is lost. */
char *parlay_pool_private(Member *me, size_t bytes);

/* Returns when no thread is inside a job: what jobs have read may be freed then. */
void parlay_pool_rest(void);

/* For tests: thread `index` sleeps `microseconds` in every `every`-th piece between computing and committing it. */
void parlay_pool_delay(int64_t index, int64_t every, int64_t microseconds);

#endif
