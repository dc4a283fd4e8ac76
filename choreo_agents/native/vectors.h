/* Vectors of WIDTH floats, under names that NAMED makes: this is compiled once for each kind of registers. */
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define MOST_TURNED 512 /* dimensions of a head at most */

typedef float vec __attribute__((vector_size(WIDTH * 4)));
typedef int32_t ivec __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t uvec __attribute__((vector_size(WIDTH * 4)));
typedef uint16_t half __attribute__((vector_size(WIDTH * 2)));

INLINE vec load(const float *from) {
    vec x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void store(float *to, vec x) { memcpy(to, &x, sizeof x); }

INLINE vec all(float x) { return x - (vec){0}; }

INLINE ivec pick_bits(ivec which, int32_t yes, int32_t no) { return (which & yes) | (~which & no); }

INLINE vec floats_of(uvec x) { return __builtin_convertvector(x, vec); }

INLINE vec pick(ivec which, vec yes, vec no) { return (vec)((which & (ivec)yes) | (~which & (ivec)no)); }

INLINE vec highest(vec a, vec b) { return pick(a > b, a, b); }

#if WIDTH == 16
INLINE float highest_of(vec x) { return _mm512_reduce_max_ps((__m512)x); }

INLINE float sum_of(vec x) { return _mm512_reduce_add_ps((__m512)x); }
#else
INLINE float highest_of(vec x) {
    float most = x[0];
    for (int i = 1; i < WIDTH; i++) most = x[i] > most ? x[i] : most;
    return most;
}

INLINE float sum_of(vec x) {
    float sum = 0;
    for (int i = 0; i < WIDTH; i++) sum += x[i];
    return sum;
}
#endif

/* e to the x, for x <= 88, to two units in the last place; 0 below -87; no number of no number. */
INLINE vec exponential(vec x) {
    const vec magic = all(12582912.0f);
    vec turns = x * 1.44269504088896341f + magic;
    uvec power = ((uvec)turns - (uvec)magic) << 23;
    vec whole = turns - magic;
    vec r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vec found = pick(x < -87.0f, (vec){0}, (vec)((uvec)p + power));
    return pick(x == x, found, x);
}

/* The hyperbolic tangent, to a few units in the last place wherever it is. */
INLINE vec tangent(vec x) {
    const vec z = x * x;
    vec p = all(-5.70498872745e-3f);
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    const vec small = x + x * z * p, far = highest(x, -x);
    vec large = 1.0f - 2.0f / (exponential(pick(far > 20.0f, all(40.0f), far + far)) + 1.0f);
    large = pick(x < 0.0f, -large, large);
    return pick(far < 0.625f, small, pick(x == x, large, x));
}

INLINE vec widened(const uint16_t *from) { /* bfloat16s */
    half x;
    memcpy(&x, from, sizeof x);
    return (vec)(__builtin_convertvector(x, uvec) << 16);
}
