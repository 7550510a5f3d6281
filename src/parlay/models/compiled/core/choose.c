/* The fastest table that this processor can run. */
#include <string.h>

#include "core.h"

#define TEXT(NAME) #NAME
#define QUOTED(NAME) TEXT(NAME)

/* From the least to the widest. Each needs what the processor is asked for beside it. */
#define PLAIN(ENTRY) ENTRY(plain, 1)
#if defined(__x86_64__)
#define HAS(FEATURE) __builtin_cpu_supports(FEATURE)
#define HAS_AVX2 (HAS("avx2") && HAS("fma") && HAS("f16c"))
#define HAS_AVX512 (HAS_AVX2 && HAS("avx512f") && HAS("avx512bw") && HAS("avx512vl") && HAS("avx512dq"))
#define X86(ENTRY)                                                                                                   \
    ENTRY(avx2, HAS_AVX2)                                                                                            \
    ENTRY(avx_vnni, HAS_AVX2 && HAS("avxvnni"))                                                                      \
    ENTRY(avx512, HAS_AVX512)                                                                                        \
    ENTRY(avx512_vnni, HAS_AVX512 && HAS("avx512vnni"))                                                              \
    ENTRY(avx512_bf16, HAS_AVX512 && HAS("avx512vnni") && HAS("avx512bf16"))
#else
#define X86(ENTRY)
#endif

#define DECLARE(NAME, NEEDS) extern const Core parlay_##NAME;
PLAIN(DECLARE)
X86(DECLARE)

/* `widest`: the table that may be chosen at most, by name; null where there is none of that name. */
const Core *parlay_core(const char *widest)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    const Core *best = 0;
#define OFFER(NAME, NEEDS)                                                                                           \
    if (NEEDS) best = &parlay_##NAME;                                                                                \
    if (!strcmp(#NAME, widest)) return best;
    PLAIN(OFFER)
    X86(OFFER)
    return 0;
}

/* Of which sources this library was built. */
const char *parlay_sources(void) { return QUOTED(SOURCES); }
