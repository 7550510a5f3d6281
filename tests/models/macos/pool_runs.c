/* Jobs of several phases on the pool, with pauses in which threads fall asleep, and once more in a forked child. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "pool.h"

enum { PIECES = 64, PHASES = 5, JOBS = 400 };
static int64_t done[PIECES], closed;

static void compute(const void *task, int64_t piece, Member *me)
{
    *(int64_t *)parlay_pool_private(me, sizeof(int64_t)) = piece + *(const int64_t *)task;
}

static void commit(const void *task, int64_t piece, Member *me)
{
    (void)task;
    done[piece] += *(int64_t *)me->private;
}

static void close_one(const void *task)
{
    (void)task;
    closed++;
}

static void job(const void *context, Member *me)
{
    for (int phase = 0; phase < PHASES; phase++) {
        Phase now = {PIECES, compute, commit, close_one, context, 0};
        if (!parlay_pool_phase(me, &now)) return;
    }
}

/* 0 where every piece was committed once in each phase. */
static int runs(void)
{
    static int64_t one = 1;
    closed = 0;
    for (int64_t piece = 0; piece < PIECES; piece++) done[piece] = 0;
    for (int count = 0; count < JOBS; count++) {
        struct timespec pause = {0, count % 50 ? 0 : 3000000};
        nanosleep(&pause, 0);
        parlay_pool_run(DECODING, 4, job, &one);
    }
    for (int64_t piece = 0; piece < PIECES; piece++)
        if (done[piece] != JOBS * PHASES * (piece + 1)) return 1;
    return closed != JOBS * PHASES;
}

int main(void)
{
    int failed = runs(), status = 1;
    parlay_pool_delay(2, 7, 2000); /* a late thread loses its pieces */
    failed |= runs();
    pid_t child = fork();
    if (!child) _exit(runs());
    waitpid(child, &status, 0);
    failed |= status;
    puts(failed ? "failed" : "ok");
    return failed != 0;
}
