/* What the functions in C share: numbers side by side, as many as a register of this CPU holds. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#if defined __AVX512F__
#define WIDTH 16
#define REGISTERS 32
#elif defined __AVX__
#define WIDTH 8
#define REGISTERS 16
#elif defined __x86_64__ || defined __i386__
#define WIDTH 4
#define REGISTERS 16
#else
#define WIDTH 4
#define REGISTERS 32
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 16")
#define SIMD _Pragma("omp simd")

typedef float floats __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef void parallel(void (*)(void *), void *, unsigned threads, unsigned flags);

/* e^x for x <= 0, within a few last bits, in steps that a compiler does for many numbers at once. */
INLINE float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    const float whole = rintf(x * 1.44269504f), rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float found = 1.9875691500e-4f;
    found = found * rest + 1.3981999507e-3f;
    found = found * rest + 8.3334519073e-3f;
    found = found * rest + 4.1665795894e-2f;
    found = found * rest + 1.6666665459e-1f;
    found = found * rest + 5.0000001201e-1f;
    found = found * rest * rest + rest + 1.0f;
    union { int32_t bits; float power; } scale = {((int32_t)whole + 127) << 23};
    return found * scale.power;
}
