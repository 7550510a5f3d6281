/* Vectors of LANES numbers, and the few operations that differ between instruction sets. All other files are written in these
 * and in GCC's vector extensions, and compiled once for each instruction set (build.py):
 *
 *     LANES    16: AVX-512    8: AVX2    4: NEON, and plain C
 *
 * Products of plain numbers take their inputs as words of 32 bits: one float32, or two bfloat16 that follow each other.
 */
#ifndef PARLAY_LANES_H
#define PARLAY_LANES_H

#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
/* Rows of plain numbers that are multiplied at once: DENSE_ROWS * STRIPS vectors of sums fill the registers. */
#define DENSE_ROWS 12
#elif defined(__AVX2__)
#include <immintrin.h>
#define LANES 8
#define DENSE_ROWS 6
#else
#if defined(__aarch64__)
#include <arm_neon.h>
#endif
#define LANES 4
#define DENSE_ROWS 6
#endif
#define STRIPS 2 /* vectors of outputs in a panel; with block formats, its strips */
#define PANEL (LANES * STRIPS)
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));
typedef int8_t vb __attribute__((vector_size(LANES)));

INLINE vf load(const void *at) { vf v; memcpy(&v, at, sizeof v); return v; }
INLINE vu load_words(const void *at) { vu v; memcpy(&v, at, sizeof v); return v; }
INLINE vh load_halfwords(const void *at) { vh v; memcpy(&v, at, sizeof v); return v; }
INLINE void store(void *at, vf v) { memcpy(at, &v, sizeof v); }
INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vu splat_word(uint32_t x) { return x - (vu){0}; }
INLINE vf as_floats(vu v) { return (vf)v; }
INLINE vf choose(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
/* The larger of a and b, lane by lane; b where either is NaN. */
INLINE vf larger(vf a, vf b)
{
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return choose(a > b, a, b);
#endif
}
INLINE vf load_halves(const char *at) /* loads numbers in half precision */
{
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
#elif defined(__aarch64__)
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)at)));
#else
    vh half;
    memcpy(&half, at, sizeof half);
    vu word = __builtin_convertvector(half, vu);
    vf size = (vf)((word & 0x7fff) << 13) * 0x1p112f;
    return (vf)((vu)size | (word & 0x8000) << 16);
#endif
}

INLINE vf load_small(const char *at) /* loads whole numbers of eight bits */
{
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at)));
#else
    vb bytes;
    memcpy(&bytes, at, sizeof bytes);
    return __builtin_convertvector(bytes, vf);
#endif
}

/* Rounds to half precision, to nearest, ties to even. */
INLINE uint16_t round_half(float x)
{
#if defined(__F16C__)
    return _cvtss_sh(x, 0);
#else
    uint32_t bits, sign;
    memcpy(&bits, &x, 4);
    sign = bits >> 16 & 0x8000, bits &= 0x7fffffff;
    if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00); /* NaN */
    if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (bits >= 0x38800000) return (uint16_t)(sign | (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
    memcpy(&x, &bits, 4);
    x += 0.5f; /* subnormal: adding 0.5 rounds to the bits that half precision has */
    memcpy(&bits, &x, 4);
    return (uint16_t)(sign | (bits - 0x3f000000));
#endif
}

INLINE vf widen_all(vh x) { return (vf)(__builtin_convertvector(x, vu) << 16); }
INLINE float widen(uint16_t x) { uint32_t word = (uint32_t)x << 16; float y; memcpy(&y, &word, 4); return y; }

/* Adds up a vector's numbers, always in the same order: halves, quarters, ... */
INLINE float sum(vf v)
{
    float part[LANES];
    store(part, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) part[i] += part[i + width];
    return part[0];
}

INLINE float largest(vf v)
{
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
#endif
}

/* Rounds to bfloat16, to nearest, ties to even; a NaN stays one. */
INLINE vh round_bf16(vf v)
{
#if defined(__AVX512BF16__)
    return (vh)_mm512_cvtneps_pbh((__m512)v);
#else
    vu word = (vu)v, up = word + 0x7fff + ((word >> 16) & 1);
    return __builtin_convertvector((vu)choose(v == v, (vf)up, (vf)(word | 0x400000)) >> 16, vh);
#endif
}

INLINE uint16_t round_one(float x)
{
    vh rounded = round_bf16(splat(x));
    return rounded[0];
}

/* How numbers are stored: as float32, as bfloat16, or ROUNDED: as float32 numbers that bfloat16 has. */
enum { FLOAT32 = 0, BFLOAT16 = 1, ROUNDED = 2 };

/* Loads a vector of numbers that are FLOAT32 or BFLOAT16. `index` counts numbers of that form. */
INLINE vf load_as(int form, const void *at, int64_t index)
{
    return form == FLOAT32 ? load((const float *)at + index) : widen_all(load_halfwords((const uint16_t *)at + index));
}

/* The same for a single number. */
INLINE float load_one(int form, const void *at, int64_t index)
{
    return form == FLOAT32 ? ((const float *)at)[index] : widen(((const uint16_t *)at)[index]);
}

/* Stores a vector in one of these forms. `index` counts numbers of that form. */
INLINE void store_as(int form, void *at, int64_t index, vf v)
{
    if (form == FLOAT32) {
        store((float *)at + index, v);
        return;
    }
    vh half = round_bf16(v);
    if (form == BFLOAT16)
        memcpy((uint16_t *)at + index, &half, sizeof half);
    else
        store((float *)at + index, widen_all(half));
}

/* The same for a single number. */
INLINE void store_one(int form, void *at, int64_t index, float x)
{
    if (form == BFLOAT16)
        ((uint16_t *)at)[index] = round_one(x);
    else
        ((float *)at)[index] = form == ROUNDED ? widen(round_one(x)) : x;
}

/* a * b + c, rounded once where the instruction set can: the same wherever it is called. */
INLINE vf multiply_add(vf a, vf b, vf c)
{
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined(__FP_FAST_FMAF)
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

/* total + inputs . weights, lane by lane: a word of each. The two
 * products of bfloat16 words are added one after the other. */
INLINE vf dot(int bf16, vf total, vu weights, vu inputs)
{
    if (!bf16) return total + as_floats(weights) * as_floats(inputs);
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)total, (__m512bh)weights, (__m512bh)inputs);
#else
    total += as_floats(weights << 16) * as_floats(inputs << 16);
    return total + as_floats(weights & 0xffff0000u) * as_floats(inputs & 0xffff0000u);
#endif
}

/* exp(x) for x <= 88, to about 1 ulp; exactly 0 far below. Cody and Waite's reduction, then a polynomial of degree 6. */
INLINE vf exponential(vf x)
{
#if defined(__AVX512F__)
    vf held = (vf)_mm512_max_ps((__m512)splat(-104.0f), (__m512)x); /* a NaN stays one */
    vf whole = (vf)_mm512_roundscale_ps((__m512)(held * 1.44269504f), 0);
#else
    vf held = choose(x < -87.0f, splat(-87.0f), x);
    vf shifted = held * 1.44269504f + 12582912.0f;
    vf whole = shifted - 12582912.0f;
#endif
    vf rest = held - whole * 0.693359375f;
    rest = rest + whole * 2.12194440e-4f;
    vf series = rest * 1.38888889e-3f + 8.33333333e-3f;
    series = series * rest + 4.16666667e-2f;
    series = series * rest + 1.66666667e-1f;
    series = series * rest + 0.5f;
    series = series * rest + 1.0f;
    series = series * rest + 1.0f;
#if defined(__AVX512F__)
    return (vf)_mm512_scalef_ps((__m512)series, (__m512)whole);
#else
    vi power = ((vi)shifted - (vi)splat(12582912.0f)) << 23;
    vf result = choose(x < -87.0f, (vf){0}, (vf)((vi)series + power));
    return choose(x == x, result, x);
#endif
}

/* cap * tanh(x / cap), to about 1e-7 of the cap. */
INLINE vf bounded(vf x, float cap)
{
    vf twice = x * (2.0f / cap);
    return cap - (2.0f * cap) / (1.0f + exponential(choose(twice > 40.0f, splat(40.0f), twice)));
}

#endif
