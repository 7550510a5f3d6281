/* Gumbel-max sampling: the tokens with the largest logit / temperature + noise. The noise of token t is -log(-log(u)), where u
 * is a uniform number made of SplitMix64's output number t of a stream: the same as in sampling/noise.py, so a token is drawn
 * alike here and there.
 *
 * Logarithms cost more than all else. So a token gets its noise only if a bound shows that it may be among the best. The
 * bound: -log(-log(u)) <= -log(1 - u), and log2(x) is at least x's bits, read as a whole number and scaled, less those of 1.
 */
#ifndef PARLAY_NOISE_H
#define PARLAY_NOISE_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define GOLDEN 0x9E3779B97F4A7C15u
#define TOKENS 64      /* tokens that are bounded together, before any gets its noise */
#define MOST_BEST 256  /* the most tokens that can be asked for */
#define UNUSABLE INT64_MIN

/* The best tokens so far: `held` of them, of which the best `count` are
 * wanted. The others are those that rounding might put among these. */
typedef struct {
    int64_t count, held;
    int lost; /* 1: more tokens are that close than there is room for */
    double least; /* no score below it is among the best `count` */
    int64_t id[2 * MOST_BEST + TOKENS];
    double score[2 * MOST_BEST + TOKENS];
} Best;

/* SplitMix64's output number `token` of the stream. */
static inline uint64_t noise_bits(uint64_t state, uint64_t token)
{
    uint64_t z = state + (token + 1) * GOLDEN;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

/* The noise of these bits in float64. It rises with the bits as a signed
 * number; u is the middle of one of 2^52 equal cells of (0, 1). */
static inline double gumbel(uint64_t bits)
{
    double u = ((double)((int64_t)bits >> 12) + (0x1p51 + 0.5)) * 0x1p-52;
    return -log(-log(u));
}

/* An upper bound of the noise of these bits. 1 - u is at least
 * the complement's upper 24 bits, which a float holds exactly. */
static inline float most_gumbel(uint64_t bits)
{
    float rest = (float)(int32_t)(~(bits ^ (uint64_t)1 << 63) >> 40);
    int32_t whole;
    memcpy(&whole, &rest, 4);
    return 0.6931472f * ((24 + 127) + 1e-4f - (float)whole * 0x1p-23f);
}

/* How close scores may be to change places where a machine's logarithm rounds otherwise. */
static inline double margin(double score) { return 1e-12 + 1e-15 * fabs(score); }

/* log(x) for normal x above 0, to some units in the last place: x = m 2^e with m around 1, and the series of 2
 * artanh((m - 1) / (m + 1)). */
static inline float quick_log(float x)
{
    int32_t whole, exponent;
    float m;
    memcpy(&whole, &x, 4);
    exponent = (whole - 0x3f3504f3) >> 23; /* the bits of sqrt(1/2) */
    whole -= exponent * (1 << 23);
    memcpy(&m, &whole, 4);
    float s = (m - 1) / (m + 1), q = s * s;
    return (float)exponent * 0.6931472f + 2 * s * (1 + q * (1.f / 3 + q * (1.f / 5 + q * (1.f / 7 + q * (1.f / 9)))));
}

/* The noise of these bits in float32, for drafts. Near u = 1, where
 * most noise that matters is, -log(u) is computed from 1 - u. */
static inline float quick_gumbel(uint64_t bits)
{
    uint64_t rising = (bits ^ (uint64_t)1 << 63) >> 1;
    float u = ((float)(int64_t)rising + 0x1p10f) * 0x1p-63f, rest = ((float)(int64_t)(~rising & INT64_MAX) + 0x1p10f) * 0x1p-63f;
    float s = rest / (2 - rest), q = s * s;
    float near = 2 * s * (1 + q * (1.f / 3 + q * (1.f / 5 + q * (1.f / 7 + q * (1.f / 9 + q * (1.f / 11))))));
    return -quick_log(rest < 0.5f ? near : -quick_log(u));
}

/* Adds noise times `temperature` to the logits of these tokens. Only for drafts: its rounding differs between machines. */
static void add_quick_noise(float *numbers, const int64_t *tokens, int64_t count, uint64_t state, float temperature)
{
    for (int64_t i = 0; i < count; i++)
        numbers[i] += temperature * quick_gumbel(noise_bits(state, (uint64_t)tokens[i]));
}

/* Sorts the tokens held, the largest score first and equal ones
 * by id, and drops those that are certainly not among the best. */
static void keep_best(Best *best)
{
    for (int64_t i = 1; i < best->held; i++) {
        int64_t id = best->id[i], j = i;
        double score = best->score[i];
        for (; j && (best->score[j - 1] < score || (best->score[j - 1] == score && best->id[j - 1] > id)); j--)
            best->score[j] = best->score[j - 1], best->id[j] = best->id[j - 1];
        best->score[j] = score, best->id[j] = id;
    }
    if (best->held < best->count) return;
    double last = best->score[best->count - 1];
    best->least = last - margin(last);
    while (best->score[best->held - 1] < best->least) best->held--;
}

/* Adds a token, unless its score is certainly too low. */
static inline void enter(Best *best, int64_t id, double score)
{
    if (score < best->least || score == -INFINITY) return;
    if (best->held == 2 * best->count + TOKENS) keep_best(best);
    if (best->held == 2 * best->count + TOKENS) {
        best->lost = 1;
        return;
    }
    best->id[best->held] = id;
    best->score[best->held++] = score;
}

/* Writes the ids of the `count` best tokens of a row, best first, and returns how many there are. Where rounding might
 * choose others or another order, it writes all that compete and returns minus their number, or 0 if they are more than
 * 2 * count + TOKENS. UNUSABLE: the row holds NaN or +infinity, or no finite number. */
static int64_t noisy_best(const float *logits, int64_t size, float temperature, uint64_t state, int64_t count, int64_t *ids)
{
    Best best = {.count = count, .least = -INFINITY};
    int finite = 0, unusable = 0;
    for (int64_t start = 0; start < size; start += TOKENS) {
        int64_t run = size - start < TOKENS ? size - start : TOKENS;
        uint64_t bits[TOKENS];
        float scores[TOKENS], most[TOKENS];
        float least = (float)(best.least - 1e-6 * (1 + fabs(best.least)));
        int any = 0;
        for (int64_t i = 0; i < run; i++) {
            bits[i] = noise_bits(state, (uint64_t)(start + i));
            scores[i] = logits[start + i] / temperature;
            finite |= scores[i] > -INFINITY;
            unusable |= !(scores[i] < INFINITY);
            most[i] = scores[i] + most_gumbel(bits[i]);
            any |= most[i] >= least;
        }
        for (int64_t i = 0; any && i < run; i++)
            if (most[i] >= least) enter(&best, start + i, (double)scores[i] + gumbel(bits[i]));
        if (any && best.held > count) keep_best(&best);
    }
    if (unusable || !finite) return UNUSABLE;
    keep_best(&best);
    if (best.lost) return 0;
    int sure = best.held <= count;
    for (int64_t i = 0; i < best.held; i++) {
        ids[i] = best.id[i];
        if (i && best.score[i - 1] - best.score[i] <= margin(best.score[i])) sure = 0;
    }
    return sure ? best.held : -best.held;
}

#endif
