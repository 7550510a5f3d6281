/* Times how fast the threads of a forward read memory at present. On a machine with other guests that changes from one second
 * to the next; forwards of few rows, which wait for weights, then take up to half as long again, those of many rows do not.
 * Python asks through the table in kernels.c; parlay/cost/memory_speed.py says what it does with the answer.
 */
#ifndef PARLAY_READING_H
#define PARLAY_READING_H

#include "codes.h"
#include "pool.h"
#include "ranks.h"

#define READ_AT_ONCE 65536 /* bytes of a piece */
#define UNTIMED 4          /* a fourth of the pieces comes first and is not timed: meanwhile sleeping threads wake up */
#define READ_AHEAD 8192    /* bytes, as products fetch their weights */

/* Pieces that lie one behind the other. */
typedef struct {
    const char *at;
} Stretch;

typedef struct {
    Stretch first, timed;
    int64_t pieces;
    int64_t *nanoseconds; /* the result, which thread 0 alone writes */
} Reading;

static void read_piece(const void *own, int64_t piece, Member *me)
{
    const char *at = ((const Stretch *)own)->at + piece * READ_AT_ONCE;
    vw all = {0};
    (void)me;
    for (int64_t byte = 0; byte < READ_AT_ONCE; byte += LANES * 4) {
        if (byte % 64 == 0) __builtin_prefetch(at + byte + READ_AHEAD);
        all |= load_bits(at + byte);
    }
    __asm__ __volatile__("" : : "m"(all)); /* else a compiler would leave the reading out */
}

static void run_reading(const void *context, Member *me)
{
    const Reading reading = *(const Reading *)context;
    int64_t untimed = reading.pieces / UNTIMED;
    Phase first = {.pieces = untimed, .commit = read_piece, .task = &reading.first};
    Phase timed = {.pieces = reading.pieces - untimed, .commit = read_piece, .task = &reading.timed};
    if (!parlay_pool_phase(me, &first)) return;
    int64_t began = nanoseconds_now();
    if (parlay_pool_phase(me, &timed) && me->index == 0) *reading.nanoseconds = nanoseconds_now() - began;
}

/* Core.read_through: returns the nanoseconds that all threads together took for each MiB of the later three quarters. */
static double read_through(const void *at, int64_t bytes, int64_t threads)
{
    int64_t pieces = bytes / READ_AT_ONCE < MOST_PIECES ? bytes / READ_AT_ONCE : MOST_PIECES, took = 0;
    int64_t untimed = pieces / UNTIMED;
    Reading reading = {{at}, {(const char *)at + untimed * READ_AT_ONCE}, pieces, &took};
    if (pieces <= untimed) return 0;
    parlay_pool_run(DECODING, threads, run_reading, &reading);
    return (double)took * (1 << 20) / (double)((pieces - untimed) * READ_AT_ONCE);
}

#endif
