/* The thread pools; pool.h says what they promise.
 *
 * Each piece of the running phase has a slot, a word of stamp, thread and state. A thread claims a piece by swapping its own
 * tag into the slot, and moves it from CLAIMED to COMMITTING to DONE. Another thread may take over a CLAIMED piece by
 * swapping in its own tag; the first one's swap to COMMITTING then fails, and it drops its result. Slots are never cleared:
 * the next phase has a higher stamp, to which all older slots count as free.
 *
 *     free --claim--> CLAIMED(a) --commit begins--> COMMITTING(a) --commit ends--> DONE(a)
 *                        |  ^
 *                        +--+ take_over: CLAIMED(b)
 *
 * Shared words are atomic and sequentially consistent, unless the code names another order. Both places where a thread
 * could miss another one rest on that: to wake sleepers, and to leave a job, each side writes its own word, then reads the
 * other's.
 */
#define _GNU_SOURCE
#include "pool.h"

#include <fenv.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>

#include "system.h"

/* How long threads spin before they sleep, in nanoseconds. Within a phase they
 * wait for a thread that commits or closes, which takes some microseconds if it
 * has a core. Between jobs they wait for the caller, who prepares the next one. */
#define SPIN_IN_PHASE 40000
#define SPIN_BETWEEN_JOBS 1000000
/* Where other processes want the cores too, a thread that spins uses up its share of them, and may keep a core from
 * another thread of the pool. So after a PERIOD in which the pool's threads waited MUCH for cores, all threads spin
 * little, for CROWDED_FOR nanoseconds. */
#define PERIOD 80000000
#define MUCH (PERIOD / 8) /* all threads' waits added up */
#define CROWDED_FOR 1000000000
#define SPIN_WHERE_CROWDED 5000
#ifndef LEAST_PATIENCE
#define LEAST_PATIENCE 5000 /* before a late piece is taken over, which makes the late thread's work useless */
#endif
#define NAP 1000000         /* the longest sleep before a thread looks whether it can take over a piece */

/* The states of a piece; and where a worker is: OUTSIDE any job, INSIDE one, or DETACHED: in a computation that the job
 * need not wait for (Phase.detached). */
enum { CLAIMED = 1, COMMITTING = 2, DONE = 3 };
enum { OUTSIDE, INSIDE, DETACHED };

/* One thread of the pool besides callers. */
typedef struct {
    /* OUTSIDE, INSIDE or DETACHED. */
    uint32_t place __attribute__((aligned(64)));
    Member member;
    pthread_t thread;
    int64_t name; /* the system's number of the thread, see system.h */
} Worker;

/* A pool: the job that runs, the phase that it has come to, and the workers. */
typedef struct Pool {
    pthread_mutex_t jobs; /* held while a job runs */
    int64_t workers;      /* threads that have been started */
    void (*job)(const void *, Member *);
    const void *context;
    int64_t count;   /* threads of the job, its caller included */
    uint64_t stamps; /* no phase so far has a higher stamp */
    uint64_t active __attribute__((aligned(64)));  /* the first stamp of the running job; 0: none runs */
    uint64_t current __attribute__((aligned(64))); /* the stamp of the running phase */
    uint64_t closing;                              /* the last stamp that a thread has begun to close */
    uint32_t bell, sleepers; /* a futex that changes when a phase ends; how many threads sleep on it */
    /* The same for the beginning of a job. */
    uint32_t job_bell __attribute__((aligned(64))), job_sleepers;
    int64_t gap, ended; /* nanoseconds between jobs, averaged over the latest; when the last one ended */
    /* For `look_around`: the thread that called it last, when, how long all threads had waited for cores by then; and
     * until when they count as crowded. */
    int64_t looker;
    int64_t looked_at, waited, crowded_until;
    int64_t delayed, delay_every, delay; /* see parlay_pool_delay */
    Member caller;
    /* For each piece: stamp << 16 | thread << 2 | state. A stamp
     * before the running phase's means that the piece is free. */
    uint64_t slot[MOST_PIECES] __attribute__((aligned(64)));
    Worker worker[MOST_THREADS];
} Pool;

static Pool pools[POOLS] = {
    {.jobs = PTHREAD_MUTEX_INITIALIZER, .delayed = -1},
    {.jobs = PTHREAD_MUTEX_INITIALIZER, .delayed = -1},
};

#define LOAD(WORD) __atomic_load_n(&(WORD), __ATOMIC_SEQ_CST)
#define STORE(WORD, VALUE) __atomic_store_n(&(WORD), VALUE, __ATOMIC_SEQ_CST)
/* For words that only decide how long threads wait. */
#define GLANCE(WORD) __atomic_load_n(&(WORD), __ATOMIC_RELAXED)
#define NOTE(WORD, VALUE) __atomic_store_n(&(WORD), VALUE, __ATOMIC_RELAXED)
#define SWAP_IF(WORD, OLD, NEW) __atomic_compare_exchange_n(&(WORD), &(OLD), NEW, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)

static int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Wakes all who sleep on a bell. Its count only changes where somebody sleeps. */
static void ring(uint32_t *word, uint32_t *sleepers)
{
    if (!LOAD(*sleepers)) return;
    __atomic_fetch_add(word, 1, __ATOMIC_SEQ_CST);
    wake(word);
}

/* At the beginning of a job, once in a PERIOD: finds out whether the threads had to wait long for cores. */
static void look_around(Pool *pool, int64_t time)
{
    if (time - pool->looked_at < PERIOD) return;
    int64_t looker = thread_name();
    int64_t waited = waited_for_core(looker), most = (time - pool->looked_at) / PERIOD * MUCH;
    for (int64_t other = 1; other <= pool->workers; other++) waited += waited_for_core(GLANCE(pool->worker[other].name));
    if (looker == pool->looker && waited - pool->waited > most) STORE(pool->crowded_until, time + CROWDED_FOR);
    pool->looker = looker, pool->looked_at = time, pool->waited = waited;
}

static int crowded(const Pool *pool, int64_t time)
{
    return time < GLANCE(pool->crowded_until);
}

/* ------------------------------------------------------------------------------------------------ pieces of a phase */

static uint64_t tag(const Member *me, uint64_t stamp, int state)
{
    return stamp << 16 | (uint64_t)me->index << 2 | (uint64_t)state;
}

/* Tells where a worker is. The caller (index 0) has no place, for the job cannot end without it. */
static void set_place(const Member *me, uint32_t place)
{
    if (me->index) STORE(me->pool->worker[me->index].place, place);
}

static void delay_for_tests(const Member *me, int64_t piece)
{
    if (GLANCE(me->pool->delayed) != me->index || piece % GLANCE(me->pool->delay_every)) return;
    const int64_t delay = GLANCE(me->pool->delay);
    struct timespec time = {delay / 1000000, delay % 1000000 * 1000};
    nanosleep(&time, 0);
}

/* Computes and commits a piece that this thread has claimed, unless
 * another one has taken it over. 0: the job has ended meanwhile. */
static int work_on(Member *me, const Phase *phase, int64_t piece, uint64_t stamp)
{
    uint64_t mine = tag(me, stamp, CLAIMED);
    if (phase->compute) {
        if (phase->detached) set_place(me, DETACHED);
        phase->compute(phase->task, piece, me);
        if (__builtin_expect(GLANCE(me->pool->delayed) >= 0, 0)) delay_for_tests(me, piece);
        /* From here on nobody can take the piece over, and the job waits for it. */
        int kept = SWAP_IF(me->pool->slot[piece], mine, tag(me, stamp, COMMITTING));
        if (phase->detached) set_place(me, INSIDE);
        if (!kept) return LOAD(me->pool->active) == me->job;
    }
    phase->commit(phase->task, piece, me);
    __atomic_store_n(&me->pool->slot[piece], tag(me, stamp, DONE), __ATOMIC_RELEASE);
    return 1;
}

/* Claims a piece, if nobody has begun it. */
static int claim(const Member *me, const Phase *phase, int64_t piece, uint64_t stamp)
{
    uint64_t seen = __atomic_load_n(&me->pool->slot[piece], __ATOMIC_RELAXED);
    return seen >> 16 < stamp && SWAP_IF(me->pool->slot[piece], seen, tag(me, stamp, phase->compute ? CLAIMED : COMMITTING));
}

/* Takes over a piece that another thread has claimed and not begun to commit. */
static int take_over(const Member *me, int64_t piece, uint64_t stamp)
{
    uint64_t seen = LOAD(me->pool->slot[piece]);
    return seen >> 16 == stamp && (seen & 3) == CLAIMED && SWAP_IF(me->pool->slot[piece], seen, tag(me, stamp, CLAIMED));
}

/* Takes over the first such piece from `next` on, and returns its number, or -1. */
static int64_t take_any_over(const Member *me, const Phase *phase, int64_t next, uint64_t stamp)
{
    for (; next < phase->pieces; next++)
        if (take_over(me, next, stamp)) return next;
    return -1;
}

/* Whether a piece of the phase is committed, or the phase is over. */
static int is_done(const Pool *pool, int64_t piece, uint64_t stamp)
{
    uint64_t seen = __atomic_load_n(&pool->slot[piece], __ATOMIC_ACQUIRE);
    return seen >> 16 > stamp || (seen >> 16 == stamp && (seen & 3) == DONE);
}

/* Does the pieces of the thread's own range in order, then steals from the others' ranges, from their ends, where their
 * owners come last. Returns how many pieces it did, or -1: the job has ended. */
static int64_t work_through(Member *me, const Phase *phase, uint64_t stamp)
{
    int64_t did = 0, from = phase->pieces * me->index / me->count, to = phase->pieces * (me->index + 1) / me->count;
    for (int64_t piece = from; piece < to; piece++)
        if (claim(me, phase, piece, stamp)) {
            if (!work_on(me, phase, piece, stamp)) return -1;
            did++;
        }
    for (int64_t other = 1; other < me->count; other++) {
        int64_t of = (me->index + other) % me->count;
        from = phase->pieces * of / me->count;
        for (int64_t piece = phase->pieces * (of + 1) / me->count - 1; piece >= from; piece--)
            if (claim(me, phase, piece, stamp)) {
                if (!work_on(me, phase, piece, stamp)) return -1;
                did++;
            }
    }
    return did;
}

/* Closes a phase whose pieces are all done, unless another thread does so already. 1: this thread has done it. */
static int close_phase(Pool *pool, const Phase *phase, uint64_t stamp)
{
    uint64_t seen = LOAD(pool->closing);
    if (seen >= stamp || !SWAP_IF(pool->closing, seen, stamp)) return 0;
    if (phase->close) phase->close(phase->task);
    STORE(pool->current, stamp + 1);
    ring(&pool->bell, &pool->sleepers);
    return 1;
}

/* Sleeps until the phase ends, or for a NAP. The count of sleepers goes up before the look at `current`: see `ring`. */
static void sleep_in_phase(Pool *pool, uint64_t stamp)
{
    __atomic_fetch_add(&pool->sleepers, 1, __ATOMIC_SEQ_CST);
    uint32_t seen = LOAD(pool->bell);
    if (LOAD(pool->current) <= stamp) sleep_on(&pool->bell, seen, NAP);
    __atomic_fetch_sub(&pool->sleepers, 1, __ATOMIC_SEQ_CST);
}

/* Waits for the end of a phase in which nothing is left to claim. Meanwhile it takes over late pieces, and closes the
 * phase when all are done. 0: the job has ended meanwhile. */
static int see_to_the_end(Member *me, const Phase *phase, uint64_t stamp, int64_t patience)
{
    int64_t next = 0, began = 0;
    for (int64_t looks = 0; LOAD(me->pool->current) <= stamp; looks++) {
        while (next < phase->pieces && is_done(me->pool, next, stamp)) next++;
        if (next == phase->pieces && close_phase(me->pool, phase, stamp)) return 1;
        if (looks % 16 < 15) {
            PAUSE();
            continue;
        }
        int64_t waited = began ? now() - began : (began = now(), 0);
        int64_t late = waited > patience && phase->compute ? take_any_over(me, phase, next, stamp) : -1;
        if (late >= 0) {
            if (!work_on(me, phase, late, stamp)) return 0;
            began = 0;
        } else if (waited > patience + (crowded(me->pool, began) ? SPIN_WHERE_CROWDED : SPIN_IN_PHASE))
            sleep_in_phase(me->pool, stamp);
    }
    return LOAD(me->pool->active) == me->job;
}

/* A phase of a job that has a single thread. */
static int phase_alone(Member *me, const Phase *phase)
{
    for (int64_t piece = 0; piece < phase->pieces; piece++) {
        if (phase->compute) phase->compute(phase->task, piece, me);
        phase->commit(phase->task, piece, me);
    }
    if (phase->close) phase->close(phase->task);
    return 1;
}

int parlay_pool_phase(Member *me, const Phase *phase)
{
    uint64_t stamp = me->stamp++;
    if (me->count == 1) return phase_alone(me, phase);
    if (LOAD(me->pool->current) > stamp) return LOAD(me->pool->active) == me->job;
    int64_t began = now(), did = work_through(me, phase, stamp);
    if (did < 0) return 0;
    int64_t each = did ? (now() - began) / did : 0;
    return see_to_the_end(me, phase, stamp, 2 * each > LEAST_PATIENCE ? 2 * each : LEAST_PATIENCE);
}

char *parlay_pool_private(Member *me, size_t bytes)
{
    if (me->private_bytes < bytes) {
        free(me->private);
        me->private_bytes = (bytes + bytes / 4 + 63) / 64 * 64;
        me->private = aligned_alloc(64, me->private_bytes);
        if (!me->private) abort(); /* it is some hundred kilobytes */
    }
    return me->private;
}

/* ------------------------------------------------------------------------------------------------------------- jobs */

/* Waits for the next job: until job_bell differs from `seen`. It
 * spins for about as long as the next job usually takes to come. */
static uint32_t next_job(Pool *pool, uint32_t seen)
{
    int64_t began = now(), gap = GLANCE(pool->gap);
    int64_t spin = gap < SPIN_BETWEEN_JOBS && !crowded(pool, began) ? 2 * gap + 20000 : 0;
    for (int64_t looks = 0; LOAD(pool->job_bell) == seen; looks++) {
        if (looks % 16 < 15 || now() - began < spin) {
            PAUSE();
            continue;
        }
        __atomic_fetch_add(&pool->job_sleepers, 1, __ATOMIC_SEQ_CST);
        sleep_on(&pool->job_bell, seen, 0);
        __atomic_fetch_sub(&pool->job_sleepers, 1, __ATOMIC_SEQ_CST);
    }
    return LOAD(pool->job_bell);
}

/* Runs the job that is active, if it wants this worker. */
static void take_part(Worker *worker)
{
    Member *me = &worker->member;
    Pool *pool = me->pool;
    /* Before it looks at `active`: the thread that ends the job writes that first, then looks at the places. */
    STORE(worker->place, INSIDE);
    uint64_t job = LOAD(pool->active);
    if (job && me->index < pool->count) {
        me->job = me->stamp = job;
        me->count = pool->count;
        pool->job(pool->context, me);
    }
    STORE(worker->place, OUTSIDE);
}

/* The main loop of a worker: waits for jobs and takes part in them. It never ends. */
static void *serve(void *own)
{
    Worker *worker = own;
    NOTE(worker->name, thread_name());
    fesetenv(FE_DFL_ENV); /* the thread that started this one may have changed rounding or traps */
    for (uint32_t seen = 0;;) {
        seen = next_job(worker->member.pool, seen);
        take_part(worker);
    }
    return 0;
}

static int start_worker(Pool *pool, int64_t index)
{
    Worker *worker = &pool->worker[index];
    pthread_attr_t attributes;
    sigset_t all, before;
    worker->place = OUTSIDE;
    worker->member = (Member){.pool = pool, .index = index};
    sigfillset(&all); /* signals are for the program's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    int failed = pthread_create(&worker->thread, &attributes, serve, worker);
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, 0);
    return !failed;
}

/* Runs in the child after a fork, where only the thread that forked lives on. Its pools are empty, and start new
 * workers when they are next used. A job that another thread was running never ends here, and its phases have used
 * stamps that `stamps` does not count. */
static void start_anew(void)
{
    forget_sleepers();
    for (Pool *pool = pools; pool < pools + POOLS; pool++) {
        pthread_mutex_init(&pool->jobs, 0);
        pool->workers = 0;
        if (pool->stamps < pool->current) pool->stamps = pool->current;
        pool->active = 0;
        pool->sleepers = pool->job_sleepers = 0;
        pool->caller.private = 0, pool->caller.private_bytes = 0; /* another thread may have been replacing it */
    }
}

static void prepare_for_forks(void)
{
    pthread_atfork(0, 0, start_anew);
}

/* Starts missing workers. Returns how many threads the job gets: fewer, if the system gives no more. */
static int64_t gather(Pool *pool, int64_t threads)
{
    static pthread_once_t prepared = PTHREAD_ONCE_INIT;
    pthread_once(&prepared, prepare_for_forks);
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    while (pool->workers + 1 < threads && start_worker(pool, pool->workers + 1)) pool->workers++;
    return pool->workers + 1 < threads ? pool->workers + 1 : threads;
}

/* Waits until all workers are at `place`. Detached ones are waited for only if `detached_too`. */
static void wait_until(Pool *pool, uint32_t place, int detached_too)
{
    for (int64_t other = 1; other <= pool->workers; other++)
        for (int64_t looks = 0;; looks++) {
            uint32_t seen = LOAD(pool->worker[other].place);
            if (seen == place || (seen == DETACHED && !detached_too)) break;
            if (looks < 1000)
                PAUSE();
            else
                /* Nobody wakes it: it looks again after 50 microseconds. */
                sleep_on(&pool->worker[other].place, seen, 50000);
        }
}

void parlay_pool_run(int which, int64_t threads, void (*job)(const void *, Member *), const void *context)
{
    Pool *pool = &pools[which];
    pthread_mutex_lock(&pool->jobs);
    pool->count = gather(pool, threads);
    pool->caller.pool = pool;
    pool->caller.count = pool->count;
    pool->job = job, pool->context = context;
    if (pool->count > 1) {
        int64_t began = now(), gap = pool->ended ? began - pool->ended : 0;
        look_around(pool, began);
        NOTE(pool->gap, pool->gap + ((gap < 4 * SPIN_BETWEEN_JOBS ? gap : 4 * SPIN_BETWEEN_JOBS) - pool->gap) / 8);
        pool->caller.job = pool->caller.stamp = pool->stamps + 1;
        STORE(pool->current, pool->stamps + 1);
        STORE(pool->active, pool->stamps + 1);
        __atomic_fetch_add(&pool->job_bell, 1, __ATOMIC_SEQ_CST);
        if (LOAD(pool->job_sleepers)) wake(&pool->job_bell);
    }
    fenv_t own; /* the caller's floating-point settings; all threads of a job compute with the default ones */
    fegetenv(&own);
    fesetenv(FE_DFL_ENV);
    job(context, &pool->caller);
    fesetenv(&own);
    if (pool->count > 1) {
        pool->stamps = pool->caller.stamp;
        STORE(pool->active, 0);
        wait_until(pool, OUTSIDE, 0);
        pool->ended = now();
    }
    pthread_mutex_unlock(&pool->jobs);
}

void parlay_pool_rest(void)
{
    for (Pool *pool = pools; pool < pools + POOLS; pool++) {
        pthread_mutex_lock(&pool->jobs);
        wait_until(pool, OUTSIDE, 1);
        pthread_mutex_unlock(&pool->jobs);
    }
}

void parlay_pool_delay(int64_t index, int64_t every, int64_t microseconds)
{
    for (Pool *pool = pools; pool < pools + POOLS; pool++) {
        pthread_mutex_lock(&pool->jobs);
        NOTE(pool->delay_every, every > 0 ? every : 1);
        NOTE(pool->delay, microseconds);
        NOTE(pool->delayed, index);
        pthread_mutex_unlock(&pool->jobs);
    }
}
