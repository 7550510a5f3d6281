/* Products by one instruction set of the decoder, for a machine that only an emulator has.
 *
 * Standard input: numbers of 64 bits, which are kind, outputs, inputs and rows of a product and the bytes of its weights
 * as a file stores them; then the weights and the rows' float32 numbers. Standard output: what the product makes with
 * all rows together, then with each row alone. Argument: the instruction set.
 */
#include <stdio.h>
#include <stdlib.h>

#include "core.h"

const Core *parlay_core(const char *widest);

static void *read_all(size_t bytes)
{
    void *at = aligned_alloc(64, (bytes + 8191) / 64 * 64);
    if (fread(at, 1, bytes, stdin) != bytes) exit(2);
    return at;
}

int main(int count, char **arguments)
{
    const Core *core = count == 2 ? parlay_core(arguments[1]) : 0;
    if (!core || strcmp(core->name, arguments[1])) return 3;
    for (int64_t about[5]; fread(about, 8, 5, stdin) == 5;) {
        const int64_t kind = about[0], out = about[1], in = about[2], rows = about[3];
        void *stored = read_all((size_t)about[4]);
        float *x = read_all((size_t)(rows * in * 4)), *y = malloc((size_t)(rows * out * 4));
        char *panels = calloc(1, (size_t)((out + core->panel - 1) / core->panel * core->panel_bytes(kind, in) + 8192));
        core->pack(kind, stored, out, in, panels);
        Linear linear = {.panels = panels, .in = in, .out = out, .kind = kind};
        core->multiply(&linear, x, rows, y);
        fwrite(y, 4, (size_t)(rows * out), stdout);
        for (int64_t row = 0; row < rows; row++) core->multiply(&linear, x + row * in, 1, y + row * out);
        fwrite(y, 4, (size_t)(rows * out), stdout);
        free(stored), free(x), free(y), free(panels);
    }
    return 0;
}
