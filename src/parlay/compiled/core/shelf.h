/* Experts of mixtures that are read from a file when rows choose them, because they do not all fit into memory.
 *
 * All else of the model is in memory, and there is room for some experts, in slots. A layer's router runs first. Experts
 * that are in slots already are computed while threads read the others, which are computed one by one as they come. An
 * expert stays in its slot until others need the room: the one used longest ago goes first (Eliseev and Mazur 2023, "Fast
 * Inference of Mixture-of-Experts Language Models with Offloading"), of layers that have more than their share, because
 * with one order for all of them a layer's experts would be gone whenever its turn comes. A late thread of the pool may
 * still read a slot that is being filled, or pointers that change: what it makes of that is never committed (pool.h).
 */
#ifndef PARLAY_SHELF_H
#define PARLAY_SHELF_H

#include "stream.h"

typedef struct Shelf Shelf;

/* An array of `struct`s of a layer's experts, see core.h. */
struct Expert;

typedef struct {
    Streaming from;       /* its layers are experts, of all layers in order; no buffers */
    int64_t layers, slots, slot_bytes;
    const int64_t *first; /* [layers + 1]: the number of each layer's first expert */
    struct Expert *const *expert; /* [layers]: those of each layer, whose panels begin at `slot` + their place */
    char *slot;           /* [slots][slot_bytes] */
} Shelving;

/* Null where there is no memory or no thread for it. All that `of` points at, but for places and firsts, must live until
 * it is closed. */
Shelf *parlay_shelf_open(const Shelving *of);

/* As `parlay_stream_close`. */
int64_t parlay_shelf_close(Shelf *shelf);

/* A forward begins, or ends: nothing is wanted, and in the former case what went wrong in the last one is forgotten. */
void parlay_shelf_begin(Shelf *shelf);
void parlay_shelf_end(Shelf *shelf);

/* Rows of a layer have chosen these experts, and run next: reading begins. Those behind the ones that are read from the
 * file are in memory in any case. One thread calls this for all, and `take`, too. */
void parlay_shelf_want(Shelf *shelf, int64_t layer, const int32_t *experts, int64_t count);

/* The next group of them, when they can be computed; those of the group before may go. */
void parlay_shelf_take(Shelf *shelf);

/* In how many groups the wanted experts of a layer come: the same number for all threads, however late one looks. */
int64_t parlay_shelf_groups(const Shelf *shelf, int64_t layer);

/* The experts of the group that was taken, in rising order; how many. For a late thread they may be any numbers. */
int64_t parlay_shelf_group(const Shelf *shelf, int32_t *experts);

/* Whether the layer's group, or one of this forward before it, can't be had: so all threads leave at the same place. */
int parlay_shelf_ends(const Shelf *shelf, int64_t layer, int64_t group);

/* Why the last forward had to end early; 0: it did not. And the bytes that were read so far. */
int64_t parlay_shelf_fault(const Shelf *shelf);
int64_t parlay_shelf_bytes(Shelf *shelf);

#endif
