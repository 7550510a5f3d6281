/* What processes of one machine exchange that run one model together, through memory that they share.
 *
 * Each writes its own part, then reads all parts. Sums add them up, rank 0's first: so all have the same sums, and a sum
 * depends on nothing but the parts. Parts alternate between two buffers: whoever begins round r has read all of round r - 1, so
 * nobody reads round r - 2 any more, whose place round r takes.
 */
#ifndef PARLAY_RANKS_H
#define PARLAY_RANKS_H

#include <sched.h>
#include <string.h>
#include <time.h>

#include "core.h"
#include "pool.h"

#define LOOKS 64           /* at another rank's number, before a rank looks at the clock and offers its core */
#define BUSY_WAIT 2000000  /* nanoseconds that a rank waits so, before it sleeps in between */
#define SHORT_SLEEP 100000 /* nanoseconds */

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

/* Leaves the core to others, and for longer once that has not helped. 0: this rank has waited long enough. */
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

/* Until a rank has written its part of this round. 0: it is lost, or another one is. */
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

static void write_part(Ranks *ranks, const float *numbers, int64_t count)
{
    ranks->round++;
    memcpy(part_of_rank(ranks, ranks->rank), numbers, (size_t)count * 4);
    __atomic_store_n(last_round(ranks, ranks->rank), ranks->round, __ATOMIC_RELEASE);
}

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

/* `numbers` are [count of ranks][each]; of `count` of each, from `at` on, this rank's are there. */
static int gather_part(Ranks *ranks, float *numbers, int64_t each, int64_t at, int64_t count)
{
    write_part(ranks, numbers + ranks->rank * each + at, count);
    for (int64_t rank = 0; rank < ranks->count; rank++) {
        if (!wait_for_part(ranks, rank)) return 0;
        memcpy(numbers + rank * each + at, part_of_rank(ranks, rank), (size_t)count * 4);
    }
    return 1;
}

/* The numbers that fit into a part, of those from `at` on. */
static int64_t some_numbers(const Ranks *ranks, int64_t at, int64_t count)
{
    return count - at < ranks->part ? count - at : ranks->part;
}

/* Puts the sums over all ranks in the place of this rank's numbers. Once a rank is lost, numbers are what they are: the
 * forward goes on to its end, and its caller sees `lost`. */
static void sum_over_ranks(Ranks *ranks, float *numbers, int64_t count)
{
    if (!ranks->memory && !ranks->lost) ranks->lost = ranks->sum(numbers, count);
    for (int64_t at = 0; at < count && ranks->memory && !ranks->lost; at += ranks->part)
        if (!sum_part(ranks, numbers + at, some_numbers(ranks, at, count))) return;
}

/* Fills in what the other ranks have of `numbers` [count of ranks][each]. A lost rank's numbers are what they are. */
static void gather_over_ranks(Ranks *ranks, float *numbers, int64_t each)
{
    if (!ranks->memory && !ranks->lost) ranks->lost = ranks->gather(numbers, each);
    for (int64_t at = 0; at < each && ranks->memory && !ranks->lost; at += ranks->part)
        if (!gather_part(ranks, numbers, each, at, some_numbers(ranks, at, each))) return;
}

#endif
