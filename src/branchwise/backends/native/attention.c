/* What nodes find among the rows of the cache that they see: the prefix of their text, and of the rows behind it those
   that are marked, both within a window where there is one.

   Queries lie side by side, as many as a register holds: those of all nodes of a text and of all heads that share a key.
   Each sums over the rows in their order, and a row that it does not see adds zero times a finite number, which changes no bit. So a node finds
   what it would find if it were the end of a text, whatever other nodes there are. */

#include "layer.h"

#define ENOUGH (1 << 15) /* products of two numbers that a thread is woken for */
#define KEYS 8           /* that are multiplied in one turn */
#define PIECE (REGISTERS / 2)

/* Queries times `count` keys: the chances before the softmax. Where there are fewer keys than in a turn, the last one
   stands in for the rest: a compiler may round a turn of another size otherwise. */
INLINE void multiply(const floats *queries, const float *keys, floats *chances, ptrdiff_t count, ptrdiff_t width,
                     float scale) {
    const float *rows[KEYS];
    floats sums[KEYS] = {0};
    UNROLLED for (ptrdiff_t k = 0; k < KEYS; k++) rows[k] = keys + (k < count ? k : count - 1) * width;
    for (ptrdiff_t i = 0; i < width; i++) UNROLLED for (ptrdiff_t k = 0; k < KEYS; k++) sums[k] += queries[i] * rows[k][i];
    for (ptrdiff_t k = 0; k < count; k++) chances[k] = sums[k] * scale;
}

/* `count` numbers of what is found: of the values of all rows, by their chances. */
INLINE void add_up(const floats *chances, const float *values, floats *found, ptrdiff_t rows, ptrdiff_t count,
                   ptrdiff_t width) {
    floats sums[PIECE] = {0};
    for (ptrdiff_t j = 0; j < rows; j++)
        UNROLLED for (ptrdiff_t k = 0; k < count; k++) sums[k] += chances[j] * values[j * width + k];
    UNROLLED for (ptrdiff_t k = 0; k < count; k++) found[k] = sums[k];
}

/* Takes from each query the chances of rows that are not marked for its node, or lie before its window, which begins at
   depth `from`. */
INLINE void hide(const attention *all, floats *chances, ptrdiff_t first, ptrdiff_t rows, ptrdiff_t length,
                 ptrdiff_t text, const ptrdiff_t *nodes, const int64_t *from) {
    const int64_t *const depths = all->column_depths + text * all->columns;
    for (ptrdiff_t j = 0; j < rows; j++) {
        const ptrdiff_t column = first + j - length;
        const int64_t depth = column < 0 ? column : depths[column];
        for (ptrdiff_t l = 0; l < WIDTH; l++) {
            const ptrdiff_t node = all->own ? text * all->nodes + nodes[l] : nodes[l];
            if (depth < from[l] || (column >= 0 && !all->seen[node * all->columns + column]))
                ((float *)(chances + j))[l] = -INFINITY;
        }
    }
}

/* As many queries as there are lanes, from `query` on, of the heads that share a key and of all nodes of a text. */
INLINE void attend_lanes(const attention *all, ptrdiff_t text, ptrdiff_t kv_head, ptrdiff_t query, floats *room,
                         const ptrdiff_t width) {
    const ptrdiff_t group = all->heads / all->kv_heads, queries = group * all->nodes, length = all->lengths[text];
    const ptrdiff_t place = (all->slots[text] * all->kv_heads + kv_head) * all->cached * width;
    const float *const keys = all->keys + place, *const values = all->values + place;
    floats *const turned = room, *const found = room + width, *const chances = room + 2 * width;
    ptrdiff_t nodes[WIDTH], heads[WIDTH], first = length;
    int64_t from[WIDTH]; /* the first depth that a query sees */
    for (ptrdiff_t l = 0; l < WIDTH; l++) {
        const ptrdiff_t own = query + l < queries ? query + l : queries - 1; /* the last one again where there is none */
        nodes[l] = own / group, heads[l] = kv_head * group + own % group;
        const ptrdiff_t depth = all->depths[text * all->nodes + nodes[l]];
        from[l] = all->window ? depth - all->window + 1 : INT64_MIN;
        const ptrdiff_t row = !all->window || length + from[l] < 0 ? 0 : length + from[l];
        first = row < first ? row : first;
        const float *const given = all->queries + (text * all->nodes + nodes[l]) * all->stride + heads[l] * width;
        for (ptrdiff_t i = 0; i < width; i++) ((float *)(turned + i))[l] = given[i];
    }
    const ptrdiff_t last = length + all->columns < all->cached ? length + all->columns : all->cached;
    const ptrdiff_t rows = last - first, before = all->window ? 0 : length - first;
    for (ptrdiff_t j = 0; j < rows; j += KEYS)
        multiply(turned, keys + (first + j) * width, chances + j, rows - j < KEYS ? rows - j : KEYS, width, all->scale);
    hide(all, chances + before, first + before, rows - before, length, text, nodes, from);
    float most[WIDTH], sums[WIDTH];
    for (ptrdiff_t l = 0; l < WIDTH; l++) most[l] = -INFINITY, sums[l] = 0;
    for (ptrdiff_t j = 0; j < rows; j++) {
        const float *const chance = (float *)(chances + j);
        SIMD for (ptrdiff_t l = 0; l < WIDTH; l++) most[l] = chance[l] > most[l] ? chance[l] : most[l];
    }
    for (ptrdiff_t j = 0; j < rows; j++) {
        float *const chance = (float *)(chances + j);
        SIMD for (ptrdiff_t l = 0; l < WIDTH; l++) {
            const float share = exponential(chance[l] - most[l]);
            chance[l] = chance[l] == -INFINITY ? 0.0f : share;
            sums[l] += chance[l];
        }
    }
    ptrdiff_t i = 0;
    for (; i + PIECE <= width; i += PIECE) add_up(chances, values + first * width + i, found + i, rows, PIECE, width);
    for (; i < width; i++) add_up(chances, values + first * width + i, found + i, rows, 1, width);
    for (ptrdiff_t l = 0; l < WIDTH && query + l < queries; l++) {
        float *const out = all->out + ((text * all->nodes + nodes[l]) * all->heads + heads[l]) * width;
        for (i = 0; i < width; i++) out[i] = ((float *)(found + i))[l] / sums[l];
    }
}

INLINE void attend_items(attention *const all, const ptrdiff_t width) {
    const ptrdiff_t queries = all->heads / all->kv_heads * all->nodes, turns = (queries + WIDTH - 1) / WIDTH;
    const ptrdiff_t worker = __atomic_fetch_add(&all->workers, 1, __ATOMIC_RELAXED);
    floats *const room = (floats *)all->room + worker * (2 * width + all->most);
    ptrdiff_t item;
    while ((item = __atomic_fetch_add(&all->next, 1, __ATOMIC_RELAXED)) < all->texts * all->kv_heads * turns)
        attend_lanes(all, item / turns / all->kv_heads, item / turns % all->kv_heads, item % turns * WIDTH, room, width);
}

/* The usual widths are known to the compiler. */
static void attend_some(void *all) {
    const ptrdiff_t width = ((attention *)all)->width;
    if (width == 64) attend_items(all, 64);
    else if (width == 128) attend_items(all, 128);
    else attend_items(all, width);
}

void attend(attention *all, unsigned threads, parallel *run) {
    const ptrdiff_t useful = all->texts * all->nodes * all->heads * all->most * all->width / ENOUGH;
    all->next = all->workers = 0;
    if (useful < threads) threads = useful;
    if (threads < 2) attend_some(all);
    else run(attend_some, all, threads, 0);
}
