/* Products of rows with a matrix (out, in) whose weights lie in the order in which they are read: in panels of 16
   outputs, in which the weights of one input are side by side, or of four inputs if they are bytes. The sums of a tile,
   some rows by a panel, stay in registers. Each runs over the inputs in their order, however many rows there are, so a
   row gives the same bits alone and among others. */

#include "layer.h"

#if WIDTH == 16 /* sums of a tile are registers, as its weights are */
#define ROWS 16
#else
#define ROWS 4
#endif
#define PANEL 16
#define VECTORS (PANEL / WIDTH)
#define ENOUGH (1 << 16) /* weights that a thread is woken for */

typedef struct job {
    void (*tile)(ptrdiff_t count, ptrdiff_t from, ptrdiff_t panel, const struct job *);
    const void *rows, *panels;
    float *out;
    ptrdiff_t count, in, size, share, next;
    const float *columns, *scales; /* of outputs and of rows, if they are bytes */
    const int32_t *zeros;
} job;

INLINE void tile(const int count, ptrdiff_t from, ptrdiff_t panel, const job *all) {
    const ptrdiff_t in = all->in;
    const float *const rows = (const float *)all->rows + from * in;
    const float *const panels = (const float *)all->panels + panel * in * PANEL;
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
#if ROWS > 4
#define MORE(tile) \
    CASE(tile, 4) CASE(tile, 5) CASE(tile, 6) CASE(tile, 7) CASE(tile, 8) CASE(tile, 9) CASE(tile, 10) \
    CASE(tile, 11) CASE(tile, 12) CASE(tile, 13) CASE(tile, 14) CASE(tile, 15)
#else
#define MORE(tile)
#endif
#define CASE(tile, n) case n: tile(n, from, panel, all); break;
#define ANY(tile) \
    static void any_##tile(ptrdiff_t count, ptrdiff_t from, ptrdiff_t panel, const job *all) { \
        switch (count) { \
            CASE(tile, 1) CASE(tile, 2) CASE(tile, 3) MORE(tile) \
            default: tile(ROWS, from, panel, all); \
        } \
    }

ANY(tile)

/* As many threads as there are take shares of the panels. */
static void work(void *given) {
    job *const all = given;
    const ptrdiff_t panels = all->size / PANEL, tiles = (all->count + ROWS - 1) / ROWS;
    ptrdiff_t first;
    while ((first = __atomic_fetch_add(&all->next, all->share, __ATOMIC_RELAXED)) < panels)
        for (ptrdiff_t panel = first; panel < first + all->share && panel < panels; panel++)
            for (ptrdiff_t tile = 0, from = 0, to; tile < tiles; tile++, from = to) {
                to = all->count * (tile + 1) / tiles;
                all->tile(to - from, from, panel, all);
            }
}

static void shared(job *all, unsigned threads, parallel *run) {
    const ptrdiff_t useful = all->in * all->size / ENOUGH;
    if (useful < threads) threads = useful;
    all->share = all->size / PANEL;
    if (threads < 2) {
        work(all);
    } else {
        all->share = (all->share + threads - 1) / threads;
        run(work, all, threads, 0);
    }
}

void float_product(const float *rows, const float *panels, float *out, ptrdiff_t count, ptrdiff_t in, ptrdiff_t size,
                   unsigned threads, parallel *run) {
    job all = {.tile = any_tile, .rows = rows, .panels = panels, .out = out, .count = count, .in = in, .size = size};
    shared(&all, threads, run);
}

#ifdef BYTES
#include <immintrin.h>
#include <string.h>
#define AHEAD 1024   /* bytes of weights that are on their way */
#define TOGETHER 128 /* rows that stay near while the weights pass by */

/* Four products of a byte without a sign, of a row, and one with a sign, of a weight, are added at a time; so four bytes
   of every row are side by side. What stands for 0 in rows is in all sums alike, `zeros` times. */
INLINE void byte_tile(const int count, ptrdiff_t from, ptrdiff_t panel, const job *all) {
    const ptrdiff_t in = all->in;
    const int32_t *rows = (const int32_t *)all->rows + from;
    const int8_t *const panels = (const int8_t *)all->panels + panel * in * PANEL;
    __m512i sums[ROWS];
    UNROLLED for (int r = 0; r < count; r++) sums[r] = _mm512_setzero_si512();
    for (ptrdiff_t i = 0; i < in; i += 4, rows += all->count) {
        const __m512i weights = _mm512_loadu_si512(panels + i * PANEL);
        _mm_prefetch((const char *)panels + i * PANEL + AHEAD, _MM_HINT_T0);
        UNROLLED for (int r = 0; r < count; r++)
            sums[r] = _mm512_dpbusd_epi32(sums[r], _mm512_set1_epi32(rows[r]), weights);
    }
    const __m512i zeros = _mm512_loadu_si512(all->zeros + panel * PANEL);
    const __m512 columns = _mm512_loadu_ps(all->columns + panel * PANEL);
    float *const out = all->out + from * all->size + panel * PANEL;
    UNROLLED for (int r = 0; r < count; r++) {
        const __m512 found = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums[r], zeros));
        _mm512_storeu_ps(out + r * all->size, found * columns * _mm512_set1_ps(all->scales[from + r]));
    }
}

ANY(byte_tile)

/* Rows are brought to bytes first, for which there is room twice. */
void byte_product(const float *rows, uint8_t *bytes, float *scales, const int8_t *panels, const float *columns,
                  const int32_t *zeros, float *out, ptrdiff_t count, ptrdiff_t in, ptrdiff_t size, float levels,
                  float least, int zero, unsigned threads, parallel *run) {
    whole_numbers(rows, 0, bytes, scales, count, in, levels, least, zero);
    uint8_t *const fours = bytes + count * in;
    for (ptrdiff_t first = 0; first < count; first += TOGETHER) {
        const ptrdiff_t some = count - first < TOGETHER ? count - first : TOGETHER;
        for (ptrdiff_t r = 0; r < some; r++)
            for (ptrdiff_t i = 0; i < in; i += 4) memcpy(fours + i * some + 4 * r, bytes + (first + r) * in + i, 4);
        job all = {.tile = any_byte_tile, .rows = fours, .panels = panels, .out = out + first * size, .count = some,
                   .in = in, .size = size, .columns = columns, .scales = scales + first, .zeros = zeros};
        shared(&all, threads, run);
    }
}
#endif
