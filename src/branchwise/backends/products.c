/* Products of rows with a matrix (out, in) whose weights lie in the order in which they are read: in panels of 16
   outputs, in which the weights of one input are side by side. The sums of a tile, up to `ROWS` rows by a panel, stay in
   registers. Each runs over the inputs in their order, however many rows there are, so a row gives the same bits alone
   and among others. */

#include "lanes.h"

#if WIDTH == 16 /* sums of a tile are registers, as its weights are */
#define ROWS 16
#else
#define ROWS 4
#endif
#define PANEL 16
#define VECTORS (PANEL / WIDTH)
#define ENOUGH (1 << 16) /* weights that a thread is woken for */

typedef struct {
    const float *rows, *panels;
    float *out;
    ptrdiff_t count, in, size, share, next;
} job;

INLINE void tile(const int count, ptrdiff_t from, ptrdiff_t panel, const job *all) {
    const ptrdiff_t in = all->in;
    const float *const rows = all->rows + from * in, *const panels = all->panels + panel * in * PANEL;
    floats sums[ROWS][VECTORS] = {0};
    for (ptrdiff_t i = 0; i < in; i++) {
        floats weights[VECTORS];
        UNROLLED for (int v = 0; v < VECTORS; v++) weights[v] = *(const floats *)(panels + i * PANEL + v * WIDTH);
        UNROLLED for (int r = 0; r < count; r++)
            UNROLLED for (int v = 0; v < VECTORS; v++) sums[r][v] += rows[r * in + i] * weights[v];
    }
    float *const out = all->out + from * all->size + panel * PANEL;
    UNROLLED for (int r = 0; r < count; r++)
        UNROLLED for (int v = 0; v < VECTORS; v++) *(floats *)(out + r * all->size + v * WIDTH) = sums[r][v];
}

/* The number of rows is known to the compiler, so that sums can be registers. */
static void any_tile(ptrdiff_t count, ptrdiff_t from, ptrdiff_t panel, const job *all) {
    switch (count) {
#define CASE(n) case n: tile(n, from, panel, all); break;
        CASE(1) CASE(2) CASE(3)
#if ROWS > 4
        CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14) CASE(15)
#endif
        default: tile(ROWS, from, panel, all);
    }
}

/* As many threads as there are take shares of the panels. */
static void work(void *given) {
    job *const all = given;
    const ptrdiff_t panels = all->size / PANEL, tiles = (all->count + ROWS - 1) / ROWS;
    ptrdiff_t first;
    while ((first = __atomic_fetch_add(&all->next, all->share, __ATOMIC_RELAXED)) < panels)
        for (ptrdiff_t panel = first; panel < first + all->share && panel < panels; panel++)
            for (ptrdiff_t tile = 0, from = 0, to; tile < tiles; tile++, from = to) {
                to = all->count * (tile + 1) / tiles;
                any_tile(to - from, from, panel, all);
            }
}

void float_product(const float *rows, const float *panels, float *out, ptrdiff_t count, ptrdiff_t in, ptrdiff_t size,
                   unsigned threads, parallel *run) {
    job all = {rows, panels, out, count, in, size, size / PANEL, 0};
    const ptrdiff_t useful = in * size / ENOUGH;
    if (useful < threads) threads = useful;
    if (threads < 2) {
        work(&all);
    } else {
        all.share = (all.share + threads - 1) / threads;
        run(work, &all, threads, 0);
    }
}
