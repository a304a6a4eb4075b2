/* A whole decoder layer, so that nothing is to be called, checked and given memory between its products: attention behind
   a norm, and a gated MLP behind another. Every part is the function that computes it alone, so it gives the same bits. */

#include "layer.h"

#include <string.h>

/* Weights as a product reads them, in floating point or, with scales of their outputs, in bytes. */
typedef struct {
    const void *panels;
    const float *columns, *bias;
    const int32_t *zeros;
    ptrdiff_t in, size;
    float levels, least;
    int zero;
} matrix;

/* `bytes` has room for the rows twice, and behind them for their scales. */
static void multiply(const matrix *by, const float *rows, float *out, ptrdiff_t count, uint8_t *bytes, unsigned threads,
                     parallel *run) {
    if (!by->columns) float_product(rows, by->panels, out, count, by->in, by->size, threads, run);
#ifdef BYTES
    else
        byte_product(rows, bytes, (float *)(bytes + 2 * count * by->in), by->panels, by->columns, by->zeros, out, count,
                     by->in, by->size, by->levels, by->least, by->zero, threads, run);
#endif
    for (ptrdiff_t r = 0; by->bias && r < count; r++)
        SIMD for (ptrdiff_t i = 0; i < by->size; i++) out[r * by->size + i] += by->bias[i];
}

typedef struct {
    const float *state, *read;              /* (rows, width) each; it attends from what it reads, */
    const float *input_norm, *norm;         /* which if nothing is given is the state behind a norm */
    const matrix *qkv, *back, *wide, *down; /* the MLP has `outputs` of the width of a state, to each of which it adds */
    float *out, *room;                      /* (rows, outputs * width) */
    turning *turning;
    attention *attention;
    ptrdiff_t rows, width, outputs;
    float input_epsilon, epsilon;
} layer;

void compute_layer(const layer *all, unsigned threads, parallel *run) {
    const ptrdiff_t rows = all->rows, width = all->width;
    float *const state = all->room, *const normed = state + rows * width, *const mixed = normed + rows * width;
    float *const found = mixed + rows * all->qkv->size, *const back = found + rows * all->back->in;
    float *const wide = back + rows * width, *const inner = wide + rows * all->wide->size;
    uint8_t *const bytes = (uint8_t *)(inner + rows * all->down->in);
    memcpy(state, all->state, sizeof(float) * rows * width);
    if (!all->read) add_norm(state, 0, all->input_norm, normed, rows, width, all->input_epsilon);
    multiply(all->qkv, all->read ? all->read : normed, mixed, rows, bytes, threads, run);
    all->turning->given = mixed;
    turn(all->turning);
    all->attention->queries = mixed;
    all->attention->out = found;
    attend(all->attention, threads, run);
    multiply(all->back, found, back, rows, bytes, threads, run);
    add_norm(state, back, all->norm, normed, rows, width, all->epsilon);
    multiply(all->wide, normed, wide, rows, bytes, threads, run);
    gated(wide, inner, rows, all->down->in);
    multiply(all->down, inner, all->out, rows, bytes, threads, run);
    for (ptrdiff_t r = 0; r < rows; r++)
        for (ptrdiff_t o = 0; o < all->outputs; o++) {
            float *const out = all->out + (r * all->outputs + o) * width;
            SIMD for (ptrdiff_t i = 0; i < width; i++) out[i] = state[r * width + i] + out[i];
        }
}

/* A gate by which embeddings select among features: what a trained head does first (FSPAD's feature sampling). */
typedef struct {
    const float *read, *embedded, *norm; /* embeddings and features side by side, and embeddings */
    const matrix *mix, *select, *up, *down;
    float *out, *room; /* (rows, width) */
    ptrdiff_t rows, width;
    float epsilon;
} gate;

void compute_gate(const gate *all, unsigned threads, parallel *run) {
    const ptrdiff_t rows = all->rows, width = all->width, wide = all->up->size;
    float *const normed = all->room, *const selected = normed + rows * width, *const up = selected + rows * wide;
    float *const both = up + rows * wide, *const inner = both + 2 * rows * wide, *const back = inner + rows * wide;
    uint8_t *const bytes = (uint8_t *)(back + rows * width);
    multiply(all->mix, all->read, all->out, rows, bytes, threads, run);
    multiply(all->select, all->embedded, selected, rows, bytes, threads, run);
    add_norm(all->out, 0, all->norm, normed, rows, width, all->epsilon);
    multiply(all->up, normed, up, rows, bytes, threads, run);
    for (ptrdiff_t r = 0; r < rows; r++) {
        memcpy(both + 2 * r * wide, selected + r * wide, sizeof(float) * wide);
        memcpy(both + (2 * r + 1) * wide, up + r * wide, sizeof(float) * wide);
    }
    gated(both, inner, rows, wide);
    multiply(all->down, inner, back, rows, bytes, threads, run);
    for (ptrdiff_t i = 0; i < rows * width; i++) all->out[i] += back[i];
}
