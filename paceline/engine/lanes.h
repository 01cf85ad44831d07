/* Sixteen floats at a time, in plain C for every processor: what the kernels of the engine share.
 *
 * A function marked FOR_EACH_CPU is compiled for several generations of processors, of which the loader takes the best;
 * what it calls is inlined. Numbers in memory are bfloat16 (`is_half`) or float32.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 12
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_CPU
#endif
#define INLINE static inline __attribute__((always_inline, unused))
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi" /* no vector is passed: all that takes one is inlined */
#endif

enum { LANES = 16 };

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

static const float LOG2_E = 1.44269504f;

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* e ^ (f ln 2) for |f| <= 0.5: least relative error of six terms, 3e-7. */
#define EXP2_OF_FRACTION(f)                                                                                      \
    ((((((1.3276473e-3f) * (f) + 9.6755419e-3f) * (f) + 5.5507131e-2f) * (f) + 2.4022120e-1f) * (f) + 6.9314694e-1f) * \
         (f) +                                                                                                   \
     1.0000001f)
static const float ROUNDING = 12582912.0f; /* added to a number, the nearest integer is in the lowest bits */

/* 2 to the power of a number that is at most 0; below -120 next to nothing. */
INLINE float exp2_below(float x) {
    const float clamped = x > -120.0f ? x : -120.0f;
    const float shifted = clamped + ROUNDING;
    const float f = clamped - (shifted - ROUNDING);
    return float_of(bits_of(EXP2_OF_FRACTION(f)) + (bits_of(shifted) << 23));
}

/* Where `is_first` has all bits the one, where it has none the other. */
INLINE Floats chosen(Words is_first, Floats first, Floats second) {
    return (Floats)((is_first & (Words)first) | (~is_first & (Words)second));
}

/* The same as `exp2_below` of each. */
INLINE Floats all_exp2_below(Floats x) {
    const Floats least = (Floats){0} - 120.0f;
    const Floats clamped = chosen((Words)(x > least), x, least);
    const Floats shifted = clamped + ROUNDING;
    const Floats f = clamped - (shifted - ROUNDING);
    return (Floats)((Words)EXP2_OF_FRACTION(f) + ((Words)shifted << 23));
}

INLINE float sum_of(Floats floats) {
    float lanes[LANES];
    memcpy(lanes, &floats, sizeof lanes);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}
