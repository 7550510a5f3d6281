/* Exchange between processes ("ranks") of one machine that run a model together, through shared memory: all-reduce
 * (`sum_over_ranks`) and all-gather (`gather_over_ranks`). core.h has the layout of the memory; ranks on other machines
 * exchange by the functions in Ranks instead.
 *
 * In each round every rank writes its own part, then reads all parts. Sums add them up from rank 0 on, so all ranks get the
 * same bits. Parts alternate between two buffers: a rank that begins round r has read all of round r - 1, so every rank has
 * written that and is done with round r - 2, whose buffer round r takes.
 */
#ifndef PARLAY_RANKS_H
#define PARLAY_RANKS_H

#include <sched.h>
#include <string.h>
#include <time.h>

#include "core.h"
#include "pool.h"

/* How often a rank looks whether another one has written, before it looks at the clock and gives its core to others. */
#define LOOKS 64
#define BUSY_WAIT 2000000  /* after so many nanoseconds of waiting a rank sleeps between looks */
#define SHORT_SLEEP 100000 /* how long it sleeps, in nanoseconds */

/* Where shared memory has the lost rank (see `Ranks`), the last round that a rank has written, and a rank's part. */
static int64_t *lost_rank(const Ranks *ranks) { return (int64_t *)ranks->memory; }

static int64_t *last_round(const Ranks *ranks, int64_t rank) { return (int64_t *)(ranks->memory + 64 * (1 + rank)); }

static float *part_of_rank(const Ranks *ranks, int64_t rank)
{
    float *parts = (float *)(ranks->memory + 64 * (1 + ranks->count));
    return parts + (ranks->round % 2 * ranks->count + rank) * ranks->part;
}

static int64_t nanoseconds_now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1000000000 + at.tv_nsec;
}

/* Gives the core to others; after BUSY_WAIT it sleeps. 0: this rank has waited for its patience. */
static int wait_a_little(const Ranks *ranks, int64_t *began)
{
    int64_t now = nanoseconds_now();
    if (!*began) *began = now;
    if (now - *began > ranks->patience) return 0;
    if (now - *began < BUSY_WAIT)
        sched_yield();
    else
        nanosleep(&(struct timespec){0, SHORT_SLEEP}, 0);
    return 1;
}

/* Waits until a rank has written its part of this round. 0: that rank or another one is lost. */
static int wait_for_part(Ranks *ranks, int64_t rank)
{
    int64_t began = 0;
    for (int64_t looks = 1; __atomic_load_n(last_round(ranks, rank), __ATOMIC_ACQUIRE) < ranks->round; looks++) {
        if (looks % LOOKS) {
            PAUSE();
            continue;
        }
        ranks->lost = __atomic_load_n(lost_rank(ranks), __ATOMIC_ACQUIRE);
        if (!ranks->lost && !wait_a_little(ranks, &began)) {
            ranks->lost = 1 + rank;
            __atomic_store_n(lost_rank(ranks), ranks->lost, __ATOMIC_RELEASE);
        }
        if (ranks->lost) return 0;
    }
    return 1;
}

/* Begins a round: writes this rank's part. */
static void write_part(Ranks *ranks, const float *numbers, int64_t count)
{
    ranks->round++;
    memcpy(part_of_rank(ranks, ranks->rank), numbers, (size_t)count * 4);
    __atomic_store_n(last_round(ranks, ranks->rank), ranks->round, __ATOMIC_RELEASE);
}

/* Replaces numbers by their sums over all ranks, as many as fit into a part. */
static int sum_part(Ranks *ranks, float *numbers, int64_t count)
{
    write_part(ranks, numbers, count);
    for (int64_t rank = 0; rank < ranks->count; rank++) {
        if (!wait_for_part(ranks, rank)) return 0;
        const float *part = part_of_rank(ranks, rank);
        if (rank == 0)
            memcpy(numbers, part, (size_t)count * 4);
        else
            for (int64_t i = 0; i < count; i++) numbers[i] += part[i];
    }
    return 1;
}

/* Fills in the other ranks' numbers, as many as fit into a part:
 * `count` of the `each` numbers of every rank, from `at` on. */
static int gather_part(Ranks *ranks, float *numbers, int64_t each, int64_t at, int64_t count)
{
    write_part(ranks, numbers + ranks->rank * each + at, count);
    for (int64_t rank = 0; rank < ranks->count; rank++) {
        if (!wait_for_part(ranks, rank)) return 0;
        memcpy(numbers + rank * each + at, part_of_rank(ranks, rank), (size_t)count * 4);
    }
    return 1;
}

/* How many of the numbers from `at` on go into one part. */
static int64_t some_numbers(const Ranks *ranks, int64_t at, int64_t count)
{
    return count - at < ranks->part ? count - at : ranks->part;
}

/* Replaces this rank's numbers by the sums over all ranks. Once a rank is lost nothing is exchanged: the forward runs
 * to its end with wrong numbers, and its caller sees `lost`. */
static void sum_over_ranks(Ranks *ranks, float *numbers, int64_t count)
{
    if (!ranks->memory && !ranks->lost) ranks->lost = ranks->sum(numbers, count);
    for (int64_t at = 0; at < count && ranks->memory && !ranks->lost; at += ranks->part)
        if (!sum_part(ranks, numbers + at, some_numbers(ranks, at, count))) return;
}

/* Fills in the other ranks' numbers in [ranks][each]. Once a rank is lost nothing is exchanged. */
static void gather_over_ranks(Ranks *ranks, float *numbers, int64_t each)
{
    if (!ranks->memory && !ranks->lost) ranks->lost = ranks->gather(numbers, each);
    for (int64_t at = 0; at < each && ranks->memory && !ranks->lost; at += ranks->part)
        if (!gather_part(ranks, numbers, each, at, some_numbers(ranks, at, each))) return;
}

#endif
