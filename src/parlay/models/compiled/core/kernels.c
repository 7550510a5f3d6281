/* Compiled once for each instruction set: CORE names the table. */
#include "forward.h"

#define TEXT(NAME) #NAME
#define QUOTED(NAME) TEXT(NAME)

const Core CORE = {QUOTED(LABEL), PANEL, pack, space_bytes, forward, parlay_pool_rest};
