/* The threads that read experts, and which expert is in which slot; shelf.h says what they promise. All state is under
 * one lock. Experts are numbered over all layers: number = first[layer] + index. */
#include "shelf.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"

#define READERS 4
#define NOTHING (-1)

/* A place for one expert. holds: its number, or NOTHING. used:
 * when it was chosen last. kept: the layer at work needs it. */
typedef struct {
    int64_t holds, used;
    int kept, reading;
} Slot;

/* A thread that reads experts. */
typedef struct {
    Shelf *shelf;
    int64_t began; /* when the piece that is being read was asked for; 0: it reads none */
} Reader;

struct Shelf {
    pthread_mutex_t lock;
    pthread_cond_t bell; /* rung on every change */
    Shelving of;
    StreamedLayer *place; /* of each expert: where the file has it */
    /* first: as in Shelving; slot_of: each expert's slot, or NOTHING. */
    int64_t *first, *slot_of;
    char **base;              /* of each expert: the slot that its pointers point into */
    int32_t *layer_of;
    Slot *slot;
    Reader reader[READERS];
    int64_t *held;   /* [layers]: how many experts of each are in slots */
    int16_t *groups; /* [layers]: how many groups each layer's wanted experts make up */
    /* The layer at work: wanted: its missing experts, in the order in which they are read; the first `asked` of them
     * are read already or being read. */
    int64_t layer, wanted[MOST_EXPERTS], count, asked;
    int64_t ready[MOST_EXPERTS], ready_count, taken;   /* experts of the first group; how many groups were taken */
    int32_t group[MOST_EXPERTS]; /* the latest group */
    /* failed: `key_of` the group that could not be read, or 0; clock: counts uses; bytes: read so far. */
    int64_t group_count, fault, failed, clock, bytes;
    int threads, ending;
};

/* Numbers the groups of a forward, in rising order. */
static int64_t key_of(int64_t layer, int64_t group) { return layer * (MOST_EXPERTS + 2) + group + 1; }

static int64_t experts_of_all(const Shelf *shelf) { return shelf->first[shelf->of.layers]; }

/* ------------------------------------------------------------------------------------------------------------- slots */

/* Whether a slot must be left alone: the layer at work needs it, or it is being read. */
static int is_awaited(const Shelf *shelf, int64_t slot) { return shelf->slot[slot].kept || shelf->slot[slot].reading; }

/* Finds a slot for an expert of `layer`: an empty one; else that of the expert used longest ago among layers with more
 * than their share of slots; else among all; or NOTHING. */
static int64_t free_slot(const Shelf *shelf, int64_t layer)
{
    int64_t oldest = NOTHING, rich = NOTHING, layers = 0;
    for (int64_t l = 0; l < shelf->of.layers; l++) layers += shelf->first[l + 1] > shelf->first[l];
    for (int64_t s = 0; s < shelf->of.slots; s++) {
        const Slot *slot = &shelf->slot[s];
        if (is_awaited(shelf, s)) continue;
        if (slot->holds == NOTHING) return s;
        const int64_t own = shelf->layer_of[slot->holds], held = shelf->held[own] + (own == layer);
        if (oldest == NOTHING || slot->used < shelf->slot[oldest].used) oldest = s;
        if (held * layers <= shelf->of.slots) continue;
        if (rich == NOTHING || slot->used < shelf->slot[rich].used) rich = s;
    }
    return rich == NOTHING ? oldest : rich;
}

/* Empties a slot; its expert must be read again. */
static void clear_slot(Shelf *shelf, int64_t s)
{
    Slot *slot = &shelf->slot[s];
    if (slot->holds == NOTHING) return;
    shelf->held[shelf->layer_of[slot->holds]]--;
    shelf->slot_of[slot->holds] = NOTHING;
    slot->holds = NOTHING;
}

/* Gives a slot to an expert, whose bytes are not there yet. */
static void fill_slot(Shelf *shelf, int64_t s, int64_t expert)
{
    clear_slot(shelf, s);
    shelf->held[shelf->layer_of[expert]]++;
    shelf->slot_of[expert] = s;
    shelf->slot[s].holds = expert, shelf->slot[s].used = ++shelf->clock;
}

/* Moves a pointer from one slot to another, if it points into the first. */
static void move_pointer(const void *held, char *from, char *to, int64_t bytes)
{
    char **pointer = (char **)held;
    if (*pointer >= from && *pointer < from + bytes) *pointer += to - from;
}

/* Makes an expert's pointers point into the slot that it has now. */
static void point(Shelf *shelf, int64_t number)
{
    const int64_t layer = shelf->layer_of[number];
    Expert *expert = (Expert *)shelf->of.expert[layer] + number - shelf->first[layer];
    Linear *linear[] = {&expert->gate, &expert->up, &expert->down};
    char *to = shelf->of.slot + shelf->slot_of[number] * shelf->of.slot_bytes, *from = shelf->base[number];
    for (int i = 0; i < 3; i++) {
        move_pointer(&linear[i]->panels, from, to, shelf->of.slot_bytes);
        move_pointer(&linear[i]->scale, from, to, shelf->of.slot_bytes);
    }
    shelf->base[number] = to;
}

/* ----------------------------------------------------------------------------------------------------------- readers */

/* Chooses the slot for the next missing expert, which counts as its
 * own from now on. NOTHING: none is missing, or no slot is free. */
static int64_t begin_next(Shelf *shelf)
{
    if (shelf->fault || shelf->asked == shelf->count) return NOTHING;
    const int64_t expert = shelf->wanted[shelf->asked], s = free_slot(shelf, shelf->layer);
    if (s == NOTHING) return NOTHING;
    shelf->asked++;
    fill_slot(shelf, s, expert);
    shelf->slot[s].kept = shelf->slot[s].reading = 1;
    return s;
}

/* Reads the expert of a slot. The lock is released meanwhile. */
static void fill(Shelf *shelf, Reader *reader, int64_t s)
{
    const int64_t expert = shelf->slot[s].holds;
    __atomic_store_n(&reader->began, parlay_stream_now(), __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&shelf->lock);
    int64_t fault = parlay_stream_watched(&shelf->of.from, expert, shelf->of.slot + s * shelf->of.slot_bytes, &reader->began);
    pthread_mutex_lock(&shelf->lock);
    __atomic_store_n(&reader->began, 0, __ATOMIC_SEQ_CST);
    shelf->slot[s].reading = 0;
    shelf->bytes += shelf->place[expert].bytes;
    if (fault) clear_slot(shelf, s), shelf->slot[s].kept = 0;
    for (int64_t i = 0; fault && i < shelf->count; i++) /* else a forward that has ended wanted it */
        if (shelf->wanted[i] == expert) shelf->fault = fault;
    pthread_cond_broadcast(&shelf->bell);
}

/* A reading thread. */
static void *serve(void *own)
{
    Reader *reader = own;
    Shelf *shelf = reader->shelf;
    pthread_mutex_lock(&shelf->lock);
    while (!shelf->ending) {
        const int64_t slot = begin_next(shelf);
        if (slot != NOTHING)
            fill(shelf, reader, slot);
        else
            pthread_cond_wait(&shelf->bell, &shelf->lock);
    }
    shelf->threads--;
    pthread_cond_broadcast(&shelf->bell);
    pthread_mutex_unlock(&shelf->lock);
    return 0;
}

/* Frees a shelf and its tables. */
static void give_back(Shelf *shelf)
{
    void *own[] = {shelf->place, shelf->first, shelf->slot_of, shelf->base, shelf->layer_of,
                   shelf->slot,  shelf->held,  shelf->groups};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) free(own[i]);
    free(shelf);
}

/* Allocates and fills in the tables of a shelf whose slots are empty. 0: there is no memory. */
static int lay_out_tables(Shelf *shelf, const Shelving *of)
{
    const size_t layers = (size_t)of->layers, experts = (size_t)of->first[layers], slots = (size_t)of->slots;
    shelf->place = malloc(experts * sizeof *shelf->place), shelf->first = malloc((layers + 1) * sizeof *shelf->first);
    shelf->slot_of = malloc(experts * sizeof *shelf->slot_of), shelf->base = malloc(experts * sizeof *shelf->base);
    shelf->layer_of = malloc(experts * sizeof *shelf->layer_of), shelf->slot = calloc(slots, sizeof *shelf->slot);
    shelf->held = calloc(layers, sizeof *shelf->held), shelf->groups = calloc(layers, sizeof *shelf->groups);
    if (!shelf->place || !shelf->first || !shelf->slot_of || !shelf->base || !shelf->layer_of || !shelf->slot ||
        !shelf->held || !shelf->groups)
        return 0;
    memcpy(shelf->place, of->from.layer, experts * sizeof *shelf->place);
    memcpy(shelf->first, of->first, (layers + 1) * sizeof *shelf->first);
    for (size_t s = 0; s < slots; s++) shelf->slot[s].holds = NOTHING;
    for (int64_t l = 0; l < of->layers; l++)
        for (int64_t e = of->first[l]; e < of->first[l + 1]; e++)
            shelf->slot_of[e] = NOTHING, shelf->base[e] = of->slot, shelf->layer_of[e] = (int32_t)l;
    return 1;
}

Shelf *parlay_shelf_open(const Shelving *of)
{
    Shelf *shelf = calloc(1, sizeof *shelf);
    if (!shelf) return 0;
    if (!lay_out_tables(shelf, of)) return give_back(shelf), (Shelf *)0;
    shelf->of = *of, shelf->of.from.layer = shelf->place, shelf->of.first = shelf->first;
    pthread_mutex_init(&shelf->lock, 0);
    pthread_cond_init(&shelf->bell, 0);
    pthread_mutex_lock(&shelf->lock);
    for (int i = 0; i < READERS; i++) {
        shelf->reader[i] = (Reader){.shelf = shelf};
        shelf->threads += parlay_stream_thread(serve, &shelf->reader[i]);
    }
    int started = shelf->threads;
    pthread_mutex_unlock(&shelf->lock);
    if (started) return shelf;
    parlay_shelf_close(shelf);
    return 0;
}

int64_t parlay_shelf_close(Shelf *shelf)
{
    int64_t end = parlay_stream_now() + shelf->of.from.patience;
    pthread_mutex_lock(&shelf->lock);
    shelf->ending = 1;
    pthread_cond_broadcast(&shelf->bell);
    while (shelf->threads && parlay_stream_wait(&shelf->bell, &shelf->lock, end)) {}
    int ended = !shelf->threads;
    pthread_mutex_unlock(&shelf->lock);
    if (!ended) return 0; /* a thread that is still reading uses this memory */
    pthread_cond_destroy(&shelf->bell);
    pthread_mutex_destroy(&shelf->lock);
    give_back(shelf);
    return 1;
}

/* ----------------------------------------------------------------------------------------------------- the forwards */

/* Clears what is wanted. What is being read is read to its end. */
static void want_nothing(Shelf *shelf)
{
    for (int64_t s = 0; s < shelf->of.slots; s++) shelf->slot[s].kept = 0;
    shelf->count = shelf->asked = shelf->ready_count = shelf->taken = 0;
}

void parlay_shelf_begin(Shelf *shelf)
{
    pthread_mutex_lock(&shelf->lock);
    __atomic_store_n(&shelf->failed, 0, __ATOMIC_SEQ_CST);
    shelf->fault = 0;
    want_nothing(shelf);
    pthread_mutex_unlock(&shelf->lock);
}

void parlay_shelf_end(Shelf *shelf)
{
    pthread_mutex_lock(&shelf->lock);
    want_nothing(shelf);
    pthread_mutex_unlock(&shelf->lock);
}

int parlay_shelf_ends(const Shelf *shelf, int64_t layer, int64_t group)
{
    int64_t failed = __atomic_load_n(&shelf->failed, __ATOMIC_SEQ_CST);
    return failed && failed <= key_of(layer, group);
}

int64_t parlay_shelf_fault(const Shelf *shelf)
{
    return __atomic_load_n(&shelf->failed, __ATOMIC_SEQ_CST) ? shelf->fault : 0;
}

int64_t parlay_shelf_bytes(Shelf *shelf)
{
    pthread_mutex_lock(&shelf->lock);
    int64_t bytes = shelf->bytes;
    pthread_mutex_unlock(&shelf->lock);
    return bytes;
}

void parlay_shelf_want(Shelf *shelf, int64_t layer, const int32_t *experts, int64_t count)
{
    const int64_t first = shelf->first[layer], all = shelf->first[layer + 1] - first;
    pthread_mutex_lock(&shelf->lock);
    want_nothing(shelf);
    shelf->layer = layer;
    for (int64_t i = 0; i < count; i++) {
        const int64_t slot = experts[i] < all ? shelf->slot_of[first + experts[i]] : NOTHING;
        if (slot != NOTHING) shelf->slot[slot].used = ++shelf->clock, shelf->slot[slot].kept = 1;
        if (experts[i] >= all || (slot != NOTHING && !shelf->slot[slot].reading))
            shelf->ready[shelf->ready_count++] = experts[i];
        else
            shelf->wanted[shelf->count++] = first + experts[i];
    }
    /* Experts that an earlier forward began to read count as asked for: they are waited for, not read again. */
    for (int64_t i = 0; i < shelf->count; i++)
        if (shelf->slot_of[shelf->wanted[i]] != NOTHING) {
            const int64_t own = shelf->wanted[i];
            shelf->wanted[i] = shelf->wanted[shelf->asked], shelf->wanted[shelf->asked++] = own;
        }
    __atomic_store_n(&shelf->groups[layer], (int16_t)((shelf->ready_count > 0) + shelf->count), __ATOMIC_SEQ_CST);
    pthread_cond_broadcast(&shelf->bell);
    pthread_mutex_unlock(&shelf->lock);
}

int64_t parlay_shelf_groups(const Shelf *shelf, int64_t layer)
{
    return __atomic_load_n(&shelf->groups[layer], __ATOMIC_SEQ_CST);
}

/* When a reader asked the disk for a piece last, which shows that the piece before had come; `asked` if none reads. */
static int64_t last_sign(Shelf *shelf, int64_t asked)
{
    int64_t last = 0;
    for (int i = 0; i < READERS; i++) {
        int64_t began = __atomic_load_n(&shelf->reader[i].began, __ATOMIC_SEQ_CST);
        last = began > last ? began : last;
    }
    return last ? last : asked;
}

/* Waits until wanted expert number `place` is read. Returns 0, or why it
 * cannot be. A disk that has stalled already is not waited for again. */
static int64_t wait_for(Shelf *shelf, int64_t place)
{
    const int64_t asked = parlay_stream_now(), expert = shelf->wanted[place];
    for (;;) {
        const int64_t slot = shelf->slot_of[expert];
        if (place < shelf->asked && slot != NOTHING && !shelf->slot[slot].reading) return 0;
        if (shelf->fault) return shelf->fault;
        if (place < shelf->asked && slot == NOTHING) return STREAM_ENDED;
        if (!parlay_stream_wait(&shelf->bell, &shelf->lock, last_sign(shelf, asked) + shelf->of.from.patience))
            return STREAM_STALLED;
    }
}

void parlay_shelf_take(Shelf *shelf)
{
    pthread_mutex_lock(&shelf->lock);
    const int64_t first = shelf->first[shelf->layer], all = shelf->first[shelf->layer + 1] - first;
    const int64_t number = shelf->taken++, place = number - (shelf->ready_count > 0);
    for (int64_t i = 0; number && i < shelf->group_count; i++)
        if (shelf->group[i] < all) shelf->slot[shelf->slot_of[first + shelf->group[i]]].kept = 0;
    pthread_cond_broadcast(&shelf->bell);
    int64_t fault = place < 0 ? 0 : wait_for(shelf, place);
    if (fault) {
        shelf->fault = fault;
        __atomic_store_n(&shelf->failed, key_of(shelf->layer, number), __ATOMIC_SEQ_CST);
    } else {
        shelf->group_count = place < 0 ? shelf->ready_count : 1;
        for (int64_t i = 0; i < shelf->group_count; i++) {
            shelf->group[i] = (int32_t)(place < 0 ? shelf->ready[i] : shelf->wanted[place] - first);
            if (shelf->group[i] < all) point(shelf, first + shelf->group[i]);
        }
    }
    pthread_mutex_unlock(&shelf->lock);
}

int64_t parlay_shelf_group(const Shelf *shelf, int32_t *experts)
{
    int64_t count = __atomic_load_n(&shelf->group_count, __ATOMIC_SEQ_CST);
    for (int64_t i = 0; i < count; i++) experts[i] = __atomic_load_n(&shelf->group[i], __ATOMIC_RELAXED);
    return count;
}
