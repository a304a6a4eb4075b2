/* The most probable tokens after rows, of a table that all texts share and of a few that each one has besides. */

#include "lanes.h"

typedef struct {
    float *logits;        /* (rows, size) for the table; what is found leaves them */
    const float *states;  /* (rows, width), of which a norm without weights is multiplied with */
    const float *extra;   /* (slots, most, width): the rows of what texts have besides */
    const int64_t *known; /* (slots, most): its tokens, and behind them -1 */
    const int64_t *table, *slots; /* (size,) tokens, and the slot of each text */
    float *values;
    int64_t *tokens; /* (rows, count) both: the logarithms of chances, best first */
    ptrdiff_t texts, nodes, size, width, most, count;
    float epsilon;
} likely;

INLINE float largest(const float *row, ptrdiff_t size) {
    float most = -INFINITY;
    _Pragma("omp simd reduction(max : most)") for (ptrdiff_t i = 0; i < size; i++) most = row[i] > most ? row[i] : most;
    return most;
}

INLINE float mass(const float *row, ptrdiff_t size, float most) {
    float sum = 0;
    _Pragma("omp simd reduction(+ : sum)") for (ptrdiff_t i = 0; i < size; i++) sum += exponential(row[i] - most);
    return sum;
}

INLINE float dot(const float *a, const float *b, ptrdiff_t width) {
    float sum = 0;
    _Pragma("omp simd reduction(+ : sum)") for (ptrdiff_t i = 0; i < width; i++) sum += a[i] * b[i];
    return sum;
}

/* The first place of this value; the last one where there is none. */
INLINE ptrdiff_t find(const float *row, ptrdiff_t size, float value) {
    ptrdiff_t place = 0;
    while (place < size - 1 && row[place] != value) place++;
    return place;
}

void most_likely(const likely *all) {
    float own[all->most + 1];
    for (ptrdiff_t r = 0; r < all->texts * all->nodes; r++) {
        const ptrdiff_t slot = all->slots[r / all->nodes], size = all->size;
        const int64_t *const known = all->known + slot * all->most;
        const float *const state = all->states + r * all->width, *row = all->extra + slot * all->most * all->width;
        float *const logits = all->logits + r * size;
        ptrdiff_t few = 0;
        while (few < all->most && known[few] >= 0) few++;
        const float scale = few ? 1.0f / sqrtf(dot(state, state, all->width) / all->width + all->epsilon) : 0;
        for (ptrdiff_t e = 0; e < few; e++, row += all->width) own[e] = dot(state, row, all->width) * scale;
        float listed = largest(logits, size), other = largest(own, few), most = listed > other ? listed : other;
        const float whole = most + logf(mass(logits, size, most) + mass(own, few, most));
        for (ptrdiff_t k = 0; k < all->count; k++) {
            const int in_table = listed >= other || !few;
            const ptrdiff_t place = in_table ? find(logits, size, listed) : find(own, few, other);
            all->values[r * all->count + k] = (in_table ? listed : other) - whole;
            all->tokens[r * all->count + k] = in_table ? all->table[place] : known[place];
            (in_table ? logits : own)[place] = -INFINITY;
            if (in_table) listed = largest(logits, size);
            else other = largest(own, few);
        }
    }
}
