/* The thread pool: two pools of a process, one for forwards, one for drafting beside them. forward.h and grow.h run jobs on
 * it; phases.h cuts the work.
 *
 * A job is a function that every thread of it runs. It comes to a sequence of phases, which are barriers: no thread begins
 * a phase before all work of the phase before is done. A phase is a number of pieces. Each thread claims the pieces of its
 * own range one by one, then steals pieces of others' ranges that nobody has begun. To do a piece is to `compute` it in
 * memory of the thread, then to `commit` the result to memory that all see.
 *
 * The system may suspend a thread at any place and give its core to another process. If that happens while it computes a
 * piece, the others do not wait for it: one of them takes the late piece over, computes it again and commits it. The late
 * thread finds that out before it commits. So a phase ends when its work is done, whichever threads have done it, and each
 * piece is committed exactly once. All threads compute a piece alike: which of them does it changes no bit.
 *
 * A thread that waits spins for a bounded time, then sleeps.
 */
#ifndef PARLAY_POOL_H
#define PARLAY_POOL_H

#include <stddef.h>
#include <stdint.h>

/* Tells the processor that a loop waits for another thread. */
#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ __volatile__("yield")
#else
#define PAUSE() (void)0
#endif

#define MOST_PIECES 8192 /* of a phase */
#define MOST_THREADS 256 /* of a pool */

/* The two pools: for forwards, and for what runs beside them (drafting). */
enum { DECODING, BESIDE, POOLS };

/* One thread of a job. A stamp is the number of a phase, counted over all jobs of the pool. */
typedef struct {
    struct Pool *pool;
    int64_t index, count; /* thread `index` of `count`; 0 is the caller */
    uint64_t job, stamp;  /* the first stamp of its job; the stamp of the phase that it comes to next */
    char *private;        /* what `compute` writes */
    size_t private_bytes;
} Member;

/* A phase. Each thread of the job builds its own copy and calls
 * `parlay_pool_phase`: all must come to the same phases in the same order. */
typedef struct {
    int64_t pieces;
    void (*compute)(const void *task, int64_t piece, Member *me); /* or null: `commit` does all of a piece */
    void (*commit)(const void *task, int64_t piece, Member *me);
    void (*close)(const void *task); /* called once, after the last piece and before any thread goes on; or null */
    const void *task;
    /* 1: `compute` reads only memory that lives until `parlay_pool_rest`.
     * Then the job ends without a thread that is late in it. */
    int detached;
} Phase;

/* Runs `job` on `threads` threads of a pool, the caller among them, and returns when it is done. Any thread may call
 * it; the jobs of one pool run one after another, those of two pools at the same time. */
void parlay_pool_run(int which, int64_t threads, void (*job)(const void *context, Member *me), const void *context);

/* Takes part in the job's next phase, and returns when it has ended. 0: the job itself has ended meanwhile, for this
 * thread was late; it must return from the job at once. */
int parlay_pool_phase(Member *me, const Phase *phase);

/* The thread's own memory for `compute`, of at least `bytes` bytes, aligned to 64. Its former content is lost. */
char *parlay_pool_private(Member *me, size_t bytes);

/* Returns when no thread is inside a job, late ones included: then all that jobs have read may be freed. */
void parlay_pool_rest(void);

/* For tests: thread `index` sleeps `microseconds` in every `every`-th piece between computing and committing it. */
void parlay_pool_delay(int64_t index, int64_t every, int64_t microseconds);

#endif
