/* Sampling in one pass: `draw` returns the token that the sampler in Python would draw from a row of logits, with temperature,
 * noise, top-k, top-p and min-p as sampling/truncation.py defines them.
 *
 * The drawn token is the best by logit plus noise (noise.h) among those that truncation leaves. So a few best ones are found
 * first, and the first of them that truncation leaves is the answer: mostly the very first. Whether it stays is decided by
 * counting and weighing the tokens before it. The row is never sorted.
 *
 * Weights here are float32, and float64 in Python. Where that difference might matter the answer is UNDECIDED, and Python
 * decides.
 *
 * `leading` finds the likeliest tokens of rows, to verify greedily and for drafts.
 */
#ifndef PARLAY_DRAW_H
#define PARLAY_DRAW_H

#include "lanes.h"
#include "noise.h"
#include "pool.h"

#define TRIES 8           /* how many best tokens are tried */
#define MOST_K 256        /* the largest top-k; Python decides where it is larger */
#define CLOSE 3e-5        /* far more than float32 and float64 sums of weights differ, as a share of the whole */
#define SUMMED (64 * LANES) /* weights that are summed in float32, before the sum is added in float64 */
#define UNDECIDED (-1)
#define LOOKED_AT (8 * LANES) /* numbers whose maximum is compared with the best so far */

/* A row of logits and how it is truncated. A quotient is a logit over the temperature; a weight is exp(quotient - top). */
typedef struct {
    const float *logits;
    int64_t size;
    float temperature, top; /* top: the largest quotient */
    int64_t top_k;          /* 0: no limit */
    double top_p, least;    /* least: min-p as a quotient; lower ones are dropped */
    double whole;           /* weight of all tokens that top-k leaves, once it is needed; 0 before */
} Row;

/* The tokens with larger quotients than some token: how many, and their weight. */
typedef struct {
    int64_t count;
    double weight;
} Before;

INLINE vf quotients(const Row *row, int64_t at) { return load(row->logits + at) / row->temperature; }

/* The largest of the quotients from..to: that of the largest logit, for division keeps the order. */
static float largest_quotient(const Row *row, int64_t from, int64_t to)
{
    vf top = splat(-INFINITY);
    for (; from + LANES <= to; from += LANES) top = larger(load(row->logits + from), top);
    float most = largest(top);
    for (; from < to; from++)
        if (row->logits[from] > most) most = row->logits[from];
    return most / row->temperature;
}

/* The first token that has the largest quotient. */
static int64_t first_of_top(const Row *row)
{
    int64_t i = 0;
    while (row->logits[i] / row->temperature != row->top) i++;
    return i;
}

/* Counts and weighs those of `count` quotients, LANES at most, that are larger than `than`, or also equal to it. */
INLINE void weigh_some(const Row *row, int64_t at, int64_t count, float than, int equal, vi *counts, vf *weights)
{
    float padded[LANES];
    for (int i = 0; i < LANES; i++) padded[i] = i < count ? row->logits[at + i] : -INFINITY;
    vf own = (count == LANES ? load(row->logits + at) : load(padded)) / row->temperature;
    vi before = equal ? own >= than : own > than;
    *counts -= before; /* a mask is -1 */
    *weights += choose(before, exponential(own - row->top), (vf){0});
}

/* The same for quotients from..to. Few strips have any that count, and only these are weighed. */
static void weigh(const Row *row, int64_t from, int64_t to, float than, int equal, Before *before)
{
    for (int64_t strip = from; strip < to; strip += SUMMED) {
        int64_t end = strip + SUMMED < to ? strip + SUMMED : to;
        float most = largest_quotient(row, strip, end);
        if (equal ? most < than : most <= than) continue;
        vi counts = {0};
        vf weights = {0};
        for (int64_t i = strip; i < end; i += LANES)
            weigh_some(row, i, end - i < LANES ? end - i : LANES, than, equal, &counts, &weights);
        for (int i = 0; i < LANES; i++) before->count += counts[i];
        before->weight += sum(weights);
    }
}

/* The weight of the top_k largest quotients. Which of equal ones are among them does not matter. */
static double weight_of_top(const Row *row)
{
    float best[MOST_K];
    int64_t kept = 0, k = row->top_k;
    for (int64_t from = 0; from < row->size; from += LANES) {
        int64_t end = from + LANES < row->size ? from + LANES : row->size;
        if (kept == k && end - from == LANES && largest(quotients(row, from)) <= best[k - 1]) continue;
        for (int64_t i = from; i < end; i++) {
            float own = row->logits[i] / row->temperature;
            if (kept == k && own <= best[k - 1]) continue;
            int64_t at = kept < k ? kept++ : kept - 1;
            for (; at > 0 && best[at - 1] < own; at--) best[at] = best[at - 1];
            best[at] = own;
        }
    }
    double weight = 0;
    for (int64_t i = 0; i < kept; i++) weight += exp((double)(best[i] - row->top));
    return weight;
}

/* The weight of all tokens that top-k leaves. */
static double whole_of(const Row *row)
{
    if (row->top_k) return weight_of_top(row);
    Before all = {0};
    weigh(row, 0, row->size, -INFINITY, 1, &all);
    return all.weight;
}

/* Whether truncation leaves a token: 1, 0, or UNDECIDED. Of equal tokens the one with the lower id comes first. */
static int stays(Row *row, int64_t token)
{
    float own = row->logits[token] / row->temperature;
    if (row->least > -INFINITY) {
        if (fabs((double)own - row->least) <= 1e-5 * (1 + fabs(row->least))) return UNDECIDED;
        if ((double)own < row->least) return 0;
    }
    if (!row->top_k && row->top_p >= 1) return 1;
    Before before = {0};
    weigh(row, 0, token, own, 1, &before);
    weigh(row, token + 1, row->size, own, 0, &before);
    if (row->top_k && before.count >= row->top_k) return 0;
    if (!before.count || row->top_p >= 1) return 1;
    if (!row->whole) row->whole = whole_of(row);
    double goal = row->top_p * row->whole;
    return fabs(before.weight - goal) <= CLOSE * row->whole ? UNDECIDED : before.weight < goal;
}

/* Draws a token from a row, with the noise of stream `state`;
 * log_min_p is -INFINITY without min-p. UNDECIDED: Python must draw. */
static int64_t draw(const float *logits, int64_t size, float temperature, int64_t top_k, double top_p, double log_min_p,
                    uint64_t state)
{
    int64_t ids[2 * TRIES + TOKENS];
    int truncates = top_k || top_p < 1 || log_min_p > -INFINITY;
    if (top_k >= size) top_k = 0;
    if (top_k > MOST_K) return UNDECIDED;
    if (!truncates) return noisy_best(logits, size, temperature, state, 1, ids) > 0 ? ids[0] : UNDECIDED;
    Row row = {logits, size, temperature, .top_k = top_k, .top_p = top_p};
    row.top = largest_quotient(&row, 0, size);
    row.least = (double)row.top + log_min_p;
    for (int64_t tries = 1; tries <= TRIES; tries *= TRIES) { /* the best one is found sooner alone, and mostly stays */
        int64_t found = noisy_best(logits, size, temperature, state, tries, ids);
        if (found <= 0) return UNDECIDED;
        if (top_k == 1) return first_of_top(&row);
        for (int64_t i = 0; i < found; i++) {
            int stay = stays(&row, ids[i]);
            if (stay) return stay > 0 ? ids[i] : UNDECIDED;
        }
    }
    return UNDECIDED;
}

/* The sum of exp(logit - most). */
static float exponentials(const float *logits, int64_t count, float most)
{
    vf sums = {0};
    int64_t whole = count / LANES * LANES;
    float total = 0;
    for (int64_t i = 0; i < whole; i += LANES) sums += exponential(load(logits + i) - most);
    for (int64_t i = whole; i < count; i++) total += __builtin_expf(logits[i] - most);
    return total + sum(sums);
}

/* Finds the places of the `most` largest numbers, the largest
 * first; of equal ones the lower place first. Returns how many. */
static int64_t best_places(const float *numbers, int64_t count, int64_t most, int32_t *found)
{
    int64_t kept = 0;
    for (int64_t from = 0; from < count; from += LOOKED_AT) {
        int64_t end = from + LOOKED_AT < count ? from + LOOKED_AT : count;
        if (kept == most && end - from == LOOKED_AT) {
            vf top = load(numbers + from);
            for (int64_t i = from + LANES; i < end; i += LANES) top = larger(load(numbers + i), top);
            if (largest(top) <= numbers[found[kept - 1]]) continue;
        }
        for (int64_t i = from; i < end; i++) {
            if (kept == most && numbers[i] <= numbers[found[kept - 1]]) continue;
            int64_t at = kept < most ? kept++ : kept - 1;
            for (; at > 0 && numbers[found[at - 1]] < numbers[i]; at--) found[at] = found[at - 1];
            found[at] = (int32_t)i;
        }
    }
    return kept;
}

/* Whether a row has a NaN or +infinity. */
static int is_unusable(const float *logits, int64_t size)
{
    int64_t whole = size / LANES * LANES;
    vi usable = ~(vi){0};
    int all = 1;
    for (int64_t i = 0; i < whole; i += LANES) usable &= load(logits + i) < INFINITY;
    for (int i = 0; i < LANES; i++) all &= usable[i];
    for (int64_t i = whole; i < size; i++) all &= logits[i] < INFINITY;
    return !all;
}

/* The arguments of `leading`. */
typedef struct {
    float *logits;
    int64_t rows, size;
    const int32_t *barred;
    int64_t bars, width;
    int32_t *ids;
    float *chances;
    int32_t *counts;
} LeadingTask;

static void lead_row(const void *own, int64_t row, Member *me)
{
    const LeadingTask *task = own;
    float *logits = task->logits + row * task->size, *chances = task->chances;
    int32_t *ids = task->ids + row * task->width;
    (void)me;
    for (int64_t i = 0; i < task->bars; i++) logits[task->barred[i]] = -INFINITY;
    int64_t found = is_unusable(logits, task->size) ? 0 : best_places(logits, task->size, task->width, ids);
    while (found && logits[ids[found - 1]] == -INFINITY) found--;
    task->counts[row] = (int32_t)found;
    if (!found || !chances) return;
    float most = logits[ids[0]], total = exponentials(logits, task->size, most);
    for (int64_t i = 0; i < found; i++) chances[row * task->width + i] = __builtin_expf(logits[ids[i]] - most) / total;
}

static void lead_rows(const void *own, Member *me)
{
    const LeadingTask *task = own;
    Phase phase = {.pieces = task->rows, .commit = lead_row, .task = task};
    parlay_pool_phase(me, &phase);
}

/* For each row, finds the `width` tokens with the largest logits, best first and of equal ones the lower id first.
 * `counts` gets how many there are: 0 for a row with NaN or +infinity. `chances`, if not null, gets their probabilities
 * by softmax. Before that, the logits of the `bars` barred tokens are set to -INFINITY. */
static void leading(float *logits, int64_t rows, int64_t size, const int32_t *barred, int64_t bars, int64_t width,
                    int32_t *ids, float *chances, int32_t *counts, int64_t threads)
{
    const LeadingTask task = {logits, rows, size, barred, bars, width, ids, chances, counts};
    if (rows > 1 && threads > 1)
        parlay_pool_run(DECODING, threads, lead_rows, &task);
    else
        for (int64_t row = 0; row < rows; row++) lead_row(&task, row, 0);
}

#endif
