/* The fastest table that this processor can run. */
#include <string.h>

#include "core.h"

#define TEXT(NAME) #NAME
#define QUOTED(NAME) TEXT(NAME)

extern const Core parlay_plain;
#if defined(__x86_64__)
extern const Core parlay_avx2, parlay_avx512, parlay_avx512_bf16;
#endif

/* `widest`: the table that may be chosen at most, by name; null where there is none of that name. */
const Core *parlay_core(const char *widest)
{
    const Core *const all[] = {&parlay_plain,
#if defined(__x86_64__)
                               &parlay_avx2, &parlay_avx512, &parlay_avx512_bf16
#endif
    };
    int count = (int)(sizeof all / sizeof *all), best = 0, most = -1;
    for (int i = 0; i < count; i++)
        if (!strcmp(all[i]->name, widest)) most = i;
    if (most < 0) return 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) best = 1;
    if (best == 1 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        best = __builtin_cpu_supports("avx512bf16") ? 3 : 2;
#endif
    return all[most < best ? most : best];
}

/* Of which sources this library was built. */
const char *parlay_sources(void) { return QUOTED(SOURCES); }
