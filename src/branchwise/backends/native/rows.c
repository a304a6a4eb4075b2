/* What a decoder layer does between its products, but for attention: norms, rotary positions, the gate of its MLP. Every
   row of a pass is computed by itself, its sums in an order that depends on nothing but how many numbers there are. So a
   node of a tree gets the bits that it would get in plain decoding, and a text of a batch those that it would get
   alone. */

#include "layer.h"

INLINE float dot(const float *a, const float *b, ptrdiff_t width) {
    float sum = 0;
    _Pragma("omp simd reduction(+ : sum)") for (ptrdiff_t i = 0; i < width; i++) sum += a[i] * b[i];
    return sum;
}

INLINE void norm_row(const float *row, const float *weight, float *out, ptrdiff_t width, float epsilon) {
    const float scale = 1.0f / sqrtf(dot(row, row, width) / width + epsilon);
    SIMD for (ptrdiff_t i = 0; i < width; i++) out[i] = weight[i] * (row[i] * scale);
}

/* Adds to each row of a state what a product found, if it found anything, and norms the sum. */
void add_norm(float *state, const float *more, const float *weight, float *out, ptrdiff_t rows, ptrdiff_t width,
              float epsilon) {
    for (ptrdiff_t r = 0; r < rows; r++, state += width, out += width) {
        if (more) {
            SIMD for (ptrdiff_t i = 0; i < width; i++) state[i] += more[i];
            more += width;
        }
        norm_row(state, weight, out, width, epsilon);
    }
}

/* silu(gate) * up, which lie side by side in each row. */
void gated(const float *given, float *out, ptrdiff_t rows, ptrdiff_t width) {
    for (ptrdiff_t r = 0; r < rows; r++, given += 2 * width, out += width)
        SIMD for (ptrdiff_t i = 0; i < width; i++) {
            const float gate = given[i], small = exponential(gate < 0 ? gate : -gate);
            out[i] = gate * ((gate < 0 ? small : 1.0f) / (1.0f + small)) * given[width + i];
        }
}

/* Brings rows to whole numbers, each by a scale of its own: as floats, or as bytes with what stands for zero. */
void whole_numbers(const float *rows, float *out, uint8_t *bytes, float *scales, ptrdiff_t count, ptrdiff_t width,
                   float levels, float least, int zero) {
    for (ptrdiff_t r = 0; r < count; r++, rows += width) {
        float most = least;
        _Pragma("omp simd reduction(max : most)") for (ptrdiff_t i = 0; i < width; i++)
            most = fabsf(rows[i]) > most ? fabsf(rows[i]) : most;
        const float scale = scales[r] = most / levels;
        if (out) {
            SIMD for (ptrdiff_t i = 0; i < width; i++) out[r * width + i] = rintf(rows[i] / scale);
        } else {
            SIMD for (ptrdiff_t i = 0; i < width; i++)
                bytes[r * width + i] = (uint8_t)((int32_t)rintf(rows[i] / scale) + zero);
        }
    }
}

/* Sums of whole numbers (count, width) times the scales of their columns and of their rows. */
void scaled(const int32_t *sums, const float *columns, const float *rows, float *out, ptrdiff_t count,
            ptrdiff_t width) {
    for (ptrdiff_t r = 0; r < count; r++, sums += width, out += width) {
        const float scale = rows[r];
        SIMD for (ptrdiff_t i = 0; i < width; i++) out[i] = (float)sums[i] * columns[i] * scale;
    }
}

INLINE void turn_head(float *head, const float *cos, const float *sin, ptrdiff_t width) {
    const ptrdiff_t half = width / 2;
    SIMD for (ptrdiff_t i = 0; i < half; i++) {
        const float first = head[i], second = head[half + i];
        head[i] = first * cos[i] - second * sin[i];
        head[half + i] = second * cos[half + i] + first * sin[half + i];
    }
}

void turn(const turning *all) {
    const ptrdiff_t width = all->width, heads = all->heads, kv_heads = all->kv_heads;
    float *row = all->given;
    for (ptrdiff_t text = 0, r = 0; text < all->texts; text++)
        for (ptrdiff_t node = 0; node < all->nodes; node++, r++, row += (heads + 2 * kv_heads) * width) {
            const float *const cos = all->cos + r * width, *const sin = all->sin + r * width;
            for (ptrdiff_t h = 0; h < heads + kv_heads; h++) {
                float *const head = row + h * width;
                const float *const norm = h < heads ? all->query_norm : all->key_norm;
                if (norm) norm_row(head, norm, head, width, all->epsilon);
                turn_head(head, cos, sin, width);
            }
            const float *const new_keys = row + heads * width, *const new_values = new_keys + kv_heads * width;
            for (ptrdiff_t h = 0; h < kv_heads; h++) {
                const ptrdiff_t place = ((all->slots[text] * kv_heads + h) * all->cached + all->places[r]) * width;
                SIMD for (ptrdiff_t i = 0; i < width; i++) {
                    all->keys[place + i] = new_keys[h * width + i];
                    all->values[place + i] = new_values[h * width + i];
                }
            }
        }
}
