/* Copies: tokens that followed the same tokens earlier in a text. A draft head of one layer finds them poorly, so they get at
 * least the chance with which such tokens come next (cf. pointer-generator networks, See et al. 2017). Only chances
 * change, and with them which tokens are drafted; verification decides as ever.
 *
 * Of the places where the last tokens occurred before, those count that agree in the most tokens, up to MOST_SAME. The
 * token that followed at most of these, of equal ones the latest, is the copy.
 */
#ifndef PARLAY_COPIES_H
#define PARLAY_COPIES_H

#include <math.h>

#include "draw.h"

#define MOST_SAME 8      /* tokens that are compared */
#define MOST_FOLLOWERS 8 /* different tokens that are counted; those of later places come first */
#define ENOUGH 16        /* places that agree in MOST_SAME tokens: earlier ones are not looked for */
#define AT_ONCE (4 * LANES)
#define LEAST_ODDS -13.8 /* the log odds of one in a million: a head that gives a token less is not believed */

/* A copy. same: in how many tokens its places agree. share: at which part of these places it followed. */
typedef struct {
    int64_t token, same;
    double share;
} Copy;

/* Counts of the tokens that followed at places that agree in `same` tokens. */
typedef struct {
    int64_t same, places, kinds;
    int64_t token[MOST_FOLLOWERS], times[MOST_FOLLOWERS];
} Followers;

/* The log odds that a copy comes next. `head`: the log odds that the head gives it. `first`: the log of the likeliest other
 * token's share of what the head gives all others. Fitted to answers of Qwen2.5-Coder-1.5B to 460 prompts of 18 kinds. */
INLINE double odds_of_copy(const Copy *copy, double head, double first)
{
    head = head > LEAST_ODDS ? head : LEAST_ODDS;
    return -0.17 + 0.69 * log((double)copy->same) + 0.65 * log(copy->share) + 0.56 * head - 0.43 * first;
}

/* In how many tokens, `known` at most, the text up to place `at` agrees with `last`, which has the latest token first. */
INLINE int64_t same_tokens(const int32_t *text, int64_t at, const int32_t *last, int64_t known)
{
    int64_t same = 0;
    while (same < known && same <= at && text[at - same] == last[same]) same++;
    return same;
}

static void count_follower(Followers *all, int64_t token)
{
    int64_t i = 0;
    all->places++;
    while (i < all->kinds && all->token[i] != token) i++;
    if (i == MOST_FOLLOWERS) return;
    if (i == all->kinds) all->token[i] = token, all->times[i] = 0, all->kinds++;
    all->times[i]++;
}

/* Whether one of the tokens from..to is `token`. */
INLINE int has_token(const int32_t *text, int64_t from, int64_t to, int32_t token)
{
    vi found = {0};
    int32_t some = 0;
    for (; from + LANES <= to; from += LANES) found |= (vi)load_words(text + from) == token - (vi){0};
    for (int i = 0; i < LANES; i++) some |= found[i];
    for (; from < to; from++) some |= text[from] == token;
    return some != 0;
}

/* Counts what followed the tokens `last`, the latest first, of which there are `known`. */
static Followers followers_of(const int32_t *text, int64_t count, const int32_t *last, int64_t known)
{
    Followers all = {0};
    for (int64_t end = count - 1; end > 0; end -= AT_ONCE) {
        int64_t begin = end > AT_ONCE ? end - AT_ONCE : 0;
        if (!has_token(text, begin, end, last[0])) continue;
        for (int64_t at = end - 1; at >= begin; at--) {
            int64_t same = text[at] == last[0] ? same_tokens(text, at, last, known) : 0;
            if (!same || same < all.same) continue;
            if (same > all.same) all = (Followers){.same = same};
            count_follower(&all, text[at + 1]);
            if (all.same == MOST_SAME && all.places == ENOUGH) return all;
        }
    }
    return all;
}

/* Finds the copy behind the tokens `last`. Returns whether there is one. */
static int find_copy(const int32_t *text, int64_t count, const int32_t *last, int64_t known, Copy *copy)
{
    Followers all = followers_of(text, count, last, known);
    int64_t best = 0;
    for (int64_t i = 1; i < all.kinds; i++)
        if (all.times[i] > all.times[best]) best = i;
    if (!all.kinds) return 0;
    *copy = (Copy){all.token[best], all.same, (double)all.times[best] / (double)all.places};
    return 1;
}

/* Raises the logit of a copy's output so that it has its chance; lowers none. */
static void raise_copy(const Copy *copy, const int64_t *tokens, float *logits, int64_t vocab)
{
    int64_t place = 0;
    while (place < vocab && tokens[place] != copy->token) place++;
    if (place == vocab || logits[place] == -INFINITY) return;
    float own = logits[place];
    logits[place] = -INFINITY; /* what remains are the others */
    Row row = {logits, vocab, 1};
    float most = largest_quotient(&row, 0, vocab);
    double others = (double)most + log(exponentials(logits, vocab, most));
    float raised = (float)(others + odds_of_copy(copy, own - others, most - others));
    logits[place] = raised > own ? raised : own; /* its own if something is NaN */
}

#endif
