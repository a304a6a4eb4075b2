/* What a decoder layer is made of, each part of which is a function that can be called by itself. */

#include "lanes.h"

#if defined __AVX512VNNI__ && WIDTH == 16
#define BYTES /* there is a product with weights of one byte */
#endif

/* Queries, keys and values of new nodes, side by side in each row: turned to their positions, the queries in place, keys
   and values written to the cache. */
typedef struct {
    float *given;
    const float *cos, *sin, *query_norm, *key_norm;
    float *keys, *values;
    const int64_t *slots, *places; /* of each text, and the row of the cache for each node */
    ptrdiff_t texts, nodes, heads, kv_heads, width, cached;
    float epsilon;
} turning;

/* What nodes attend to. */
typedef struct {
    const float *queries, *keys, *values;
    const int64_t *slots, *lengths;
    const int64_t *depths, *column_depths; /* (texts, nodes) and (texts, columns), counted from the end of the prefix */
    const uint8_t *seen;                   /* (texts or 1, nodes, columns) */
    float *out, *room;
    ptrdiff_t texts, nodes, heads, kv_heads, width, stride, cached, columns, own, most, window, next, workers;
    float scale;
} attention;

void float_product(const float *rows, const float *panels, float *out, ptrdiff_t count, ptrdiff_t in, ptrdiff_t size,
                   unsigned threads, parallel *run);
void byte_product(const float *rows, uint8_t *bytes, float *scales, const int8_t *panels, const float *columns,
                  const int32_t *zeros, float *out, ptrdiff_t count, ptrdiff_t in, ptrdiff_t size, float levels,
                  float least, int zero, unsigned threads, parallel *run);
void whole_numbers(const float *rows, float *out, uint8_t *bytes, float *scales, ptrdiff_t count, ptrdiff_t width,
                   float levels, float least, int zero);
void add_norm(float *state, const float *more, const float *weight, float *out, ptrdiff_t rows, ptrdiff_t width,
              float epsilon);
void gated(const float *given, float *out, ptrdiff_t rows, ptrdiff_t width);
void turn(const turning *all);
void attend(attention *all, unsigned threads, parallel *run);
