/* The most probable of many tokens, row by row. */

#include "lanes.h"

INLINE float largest(const float *row, ptrdiff_t size) {
    float most = -INFINITY;
    _Pragma("omp simd reduction(max : most)") for (ptrdiff_t i = 0; i < size; i++) most = row[i] > most ? row[i] : most;
    return most;
}

/* The logarithms of the chances of the `count` most probable tokens of each row, of equal ones the first, and their
   places. What is found leaves the logits. */
void most_likely(float *logits, float *values, int64_t *places, ptrdiff_t rows, ptrdiff_t size, ptrdiff_t count) {
    for (ptrdiff_t r = 0; r < rows; r++, logits += size) {
        float best = largest(logits, size), sum = 0;
        _Pragma("omp simd reduction(+ : sum)") for (ptrdiff_t i = 0; i < size; i++) sum += exponential(logits[i] - best);
        const float all = best + logf(sum);
        for (ptrdiff_t k = 0; k < count; k++) {
            ptrdiff_t place = 0;
            while (place < size - 1 && logits[place] != best) place++;
            *values++ = best - all;
            *places++ = place;
            logits[place] = -INFINITY;
            best = largest(logits, size);
        }
    }
}
