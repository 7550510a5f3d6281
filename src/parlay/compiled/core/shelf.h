/* Expert offloading: a mixture that does not fit into memory keeps its experts in a file, and has slots in memory for some.
 * experts.h calls these functions in a forward; Python opens and closes the shelf.
 *
 * The router runs first, and `want` says which experts the rows have chosen. Those that are in slots already are the first
 * group, which is computed while threads read the others; each of these is a group by itself, as it comes (`take`).
 *
 * An expert stays in its slot until another one needs the room. Then the one that was used longest ago goes (Eliseev and Mazur
 * 2023, "Fast Inference of Mixture-of-Experts Language Models with Offloading"), but only among layers that have more than
 * their share of slots: with one order for all layers, a layer's experts would always be gone when its turn comes again.
 *
 * A late thread of the pool may still read a slot that is being filled, or pointers that change: what it makes of that is never
 * committed (pool.h).
 */
#ifndef PARLAY_SHELF_H
#define PARLAY_SHELF_H

#include "stream.h"

typedef struct Shelf Shelf;

/* Expert of core.h. */
struct Expert;

/* What a shelf reads, and to where. */
typedef struct {
    Streaming from;       /* the file; its "layers" are the experts of all layers in order. It has no buffers */
    int64_t layers, slots, slot_bytes;
    const int64_t *first; /* [layers + 1]: the number of each layer's first expert */
    /* [layers]: each layer's experts. Their pointers to panels begin as `slot` plus the place in an expert's bytes. */
    struct Expert *const *expert;
    char *slot;           /* [slots][slot_bytes] */
} Shelving;

/* Starts the threads. Null: there is no memory or no thread. What `of` points at must live until the shelf is closed,
 * but for the arrays of places and firsts, which are copied. */
Shelf *parlay_shelf_open(const Shelving *of);

/* Ends the threads, as parlay_stream_close does. */
int64_t parlay_shelf_close(Shelf *shelf);

/* Called when a forward begins or ends: no expert is wanted any more. `begin` also forgets the last forward's fault. */
void parlay_shelf_begin(Shelf *shelf);
void parlay_shelf_end(Shelf *shelf);

/* Says which experts of a layer the rows have chosen: reading begins. Experts behind those that are in the file (a
 * shared one) are always in memory. One thread calls this for all, and `take`, too. */
void parlay_shelf_want(Shelf *shelf, int64_t layer, const int32_t *experts, int64_t count);

/* Waits until the next group of these experts can be computed. The slots of the group before may be used again. */
void parlay_shelf_take(Shelf *shelf);

/* How many groups the wanted experts of a layer make up: the same number for all threads, however late they are. */
int64_t parlay_shelf_groups(const Shelf *shelf, int64_t layer);

/* Writes the experts of the latest group in rising order, and returns how many. A late thread may get any numbers. */
int64_t parlay_shelf_group(const Shelf *shelf, int32_t *experts);

/* Whether this group, or one before it in this forward, could not
 * be read: so all threads leave the forward at the same place. */
int parlay_shelf_ends(const Shelf *shelf, int64_t layer, int64_t group);

/* Why the last forward ended early, 0: it did not; and how many bytes have been read so far. */
int64_t parlay_shelf_fault(const Shelf *shelf);
int64_t parlay_shelf_bytes(Shelf *shelf);

#endif
