/* Chooses the table of functions (Core) for the widest instruction set that both the compiler knew and this processor
 * has. library.py calls `parlay_core` once. */
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include "core.h"

#define TEXT(NAME) #NAME
#define QUOTED(NAME) TEXT(NAME)

/* The instruction sets from the least to the widest, each with what it needs of the processor. */
#define PLAIN(ENTRY) ENTRY(plain, 1)
#if defined(__x86_64__)

/* Reads a bit of what the cpuid instruction returns, for features that older compilers have no name for. */
#define ASKED(LEAF, SUBLEAF, REGISTER, BIT) (ask(LEAF, SUBLEAF).REGISTER >> (BIT) & 1)
typedef struct {
    unsigned a, b, c, d;
} Registers;

static Registers ask(unsigned leaf, unsigned subleaf)
{
    Registers r = {0, 0, 0, 0};
    __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);
    return r;
}

#define HAS(FEATURE) __builtin_cpu_supports(FEATURE)
#define HAS_AVX2 (HAS("avx2") && HAS("fma") && ASKED(1, 0, c, 29)) /* F16C */
#define HAS_AVX512 (HAS_AVX2 && HAS("avx512f") && HAS("avx512bw") && HAS("avx512vl") && HAS("avx512dq"))
#define HAS_AVX_VNNI ASKED(7, 1, a, 4)
#define HAS_AVX512_VNNI ASKED(7, 0, c, 11)
#define HAS_AVX512_BF16 ASKED(7, 1, a, 5)
#define WIDER(ENTRY)                                                                                                 \
    ENTRY(avx2, HAS_AVX2)                                                                                            \
    ENTRY(avx_vnni, HAS_AVX2 && HAS_AVX_VNNI)                                                                        \
    ENTRY(avx512, HAS_AVX512)                                                                                        \
    ENTRY(avx512_vnni, HAS_AVX512 && HAS_AVX512_VNNI)                                                                \
    ENTRY(avx512_bf16, HAS_AVX512 && HAS_AVX512_VNNI && HAS_AVX512_BF16)
#elif defined(__aarch64__) && defined(__linux__)
#define HAS_DOTPROD (getauxval(AT_HWCAP) >> 20 & 1) /* HWCAP_ASIMDDP, for which older headers have no name */
#define WIDER(ENTRY) ENTRY(dotprod, HAS_DOTPROD)
#elif defined(__aarch64__) && defined(__APPLE__)
static int has_dotprod(void)
{
    int known = 0;
    size_t size = sizeof known;
    return !sysctlbyname("hw.optional.arm.FEAT_DotProd", &known, &size, 0, 0) && known;
}
#define WIDER(ENTRY) ENTRY(dotprod, has_dotprod())
#else
#define WIDER(ENTRY)
#endif

/* Stands for the table of an instruction set that the compiler
 * does not know: build.py defines that table's name as this one. */
const Core parlay_none = {0};
#define DECLARE(NAME, NEEDS) extern const Core parlay_##NAME;
PLAIN(DECLARE)
WIDER(DECLARE)

/* Returns the best table up to the one named `widest`; null if none has that name. */
const Core *parlay_core(const char *widest)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    const Core *best = 0;
#define OFFER(NAME, NEEDS)                                                                                           \
    if (&parlay_##NAME != &parlay_none && (NEEDS)) best = &parlay_##NAME;                                            \
    if (!strcmp(#NAME, widest)) return best;
    PLAIN(OFFER)
    WIDER(OFFER)
    return 0;
}

/* The digest of the sources that this library was built of. */
const char *parlay_sources(void) { return QUOTED(SOURCES); }
