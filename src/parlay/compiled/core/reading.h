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

/* Pieces that lie one behind the other; and when, in nanoseconds, the first of them was begun and the last one read. */
typedef struct {
    const char *at;
    int64_t began, ended;
} Stretch;

typedef struct {
    Stretch untimed, timed;
    int64_t pieces; /* of both together */
} Reading;

static void read_piece(const void *own, int64_t piece, Member *me)
{
    Stretch *stretch = (Stretch *)own;
    const char *at = stretch->at + piece * READ_AT_ONCE;
    int64_t none = 0;
    vw all = {0};
    (void)me;
    __atomic_compare_exchange_n(&stretch->began, &none, nanoseconds_now(), 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    for (int64_t byte = 0; byte < READ_AT_ONCE; byte += LANES * 4) {
        if (byte % 64 == 0) __builtin_prefetch(at + byte + READ_AHEAD);
        all |= load_bits(at + byte);
    }
    __asm__ __volatile__("" : : "m"(all)); /* else a compiler would leave the reading out */
}

static void end_stretch(const void *own)
{
    ((Stretch *)own)->ended = nanoseconds_now();
}

static void run_reading(const void *context, Member *me)
{
    const Reading *reading = context;
    int64_t untimed = reading->pieces / UNTIMED;
    Phase first = {.pieces = untimed, .commit = read_piece, .task = &reading->untimed};
    Phase timed = {.pieces = reading->pieces - untimed, .commit = read_piece, .close = end_stretch, .task = &reading->timed};
    if (parlay_pool_phase(me, &first)) parlay_pool_phase(me, &timed);
}

/* Core.read_through: returns the nanoseconds that all threads together took for each MiB of the later three quarters. */
static double read_through(const void *at, int64_t bytes, int64_t threads)
{
    int64_t pieces = bytes / READ_AT_ONCE < MOST_PIECES ? bytes / READ_AT_ONCE : MOST_PIECES, untimed = pieces / UNTIMED;
    Reading reading = {{at, 0, 0}, {(const char *)at + untimed * READ_AT_ONCE, 0, 0}, pieces};
    if (!pieces) return 0;
    parlay_pool_run(DECODING, threads, run_reading, &reading);
    int64_t took = reading.timed.ended - reading.timed.began;
    return (double)took * (1 << 20) / (double)((pieces - untimed) * READ_AT_ONCE);
}

#endif
