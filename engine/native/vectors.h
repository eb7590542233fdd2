// Sixteen floats at once, on any CPU: the compiler splits them where it must.

#pragma once

#include <cstring>

#include "numbers.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef uint32_t Words __attribute__((vector_size(64)));

inline Floats load(const float* from) {
    Floats out;
    memcpy(&out, from, sizeof out);
    return out;
}

inline Floats load(const bf16* from) {
    Halves halves;
    memcpy(&halves, from, sizeof halves);
    const Words words = __builtin_convertvector(halves, Words) << 16;
    Floats out;
    memcpy(&out, &words, sizeof out);
    return out;
}

// The first `count` of sixteen, and zeros.
template <class T>
inline Floats load(const T* from, int count) {
    if (count >= kLanes) return load(from);
    float line[kLanes] = {};
    for (int i = 0; i < count; ++i) line[i] = widen(from[i]);
    return load(line);
}

inline Floats all(float value) { return Floats{} + value; }

// The sums of sixteen lines of sixteen floats.
inline void sum_lines(const Floats* lines, float* sums) {
#ifdef __AVX512F__
    __m512 quads[4];
    for (int i = 0; i < 4; ++i) {
        const __m512 a = (__m512)lines[4 * i], b = (__m512)lines[4 * i + 1];
        const __m512 c = (__m512)lines[4 * i + 2], d = (__m512)lines[4 * i + 3];
        const __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
        const __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
        quads[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)),
                                 _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
    }
    __m512 halves[2];
    for (int i = 0; i < 2; ++i)
        halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(quads[2 * i], quads[2 * i + 1], 0x44),
                                  _mm512_shuffle_f32x4(quads[2 * i], quads[2 * i + 1], 0xee));
    _mm512_storeu_ps(sums, _mm512_add_ps(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88),
                                         _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd)));
#else
    for (int i = 0; i < kLanes; ++i) {
        float sum = 0.0f;
        for (int lane = 0; lane < kLanes; ++lane) sum += lines[i][lane];
        sums[i] = sum;
    }
#endif
}
