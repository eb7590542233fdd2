// Sixteen floats at once, on any CPU: the compiler splits them where it must.

#pragma once

#include <cstring>
#include <initializer_list>

#include "numbers.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int32_t Signed __attribute__((vector_size(64)));
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

#ifdef __AVX512F__
// A half-precision float with the bits of an e4m3 in their places is smaller by 2^8. The one magnitude that is no number,
// 127, carries into the highest bit of the exponent.
inline Floats load(const e4m3* from) {
    __m128i bytes;
    memcpy(&bytes, from, sizeof bytes);
    const __m256i codes = _mm256_cvtepi8_epi16(bytes);
    const __m256i places = _mm256_and_si256(_mm256_slli_epi16(codes, 7), _mm256_set1_epi16(static_cast<short>(0xbfff)));
    const __m256i carried = _mm256_add_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(1));
    const __m256i none = _mm256_slli_epi16(_mm256_and_si256(carried, _mm256_set1_epi16(0x80)), 7);
    return (Floats)_mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(places, none)), _mm512_set1_ps(256.0f));
}

// The upper byte of a half-precision float.
inline Floats load(const e5m2* from) {
    __m128i bytes;
    memcpy(&bytes, from, sizeof bytes);
    return (Floats)_mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8));
}
#else
template <class C>
inline Floats load(const C* from) {
    Floats out;
    for (int i = 0; i < kLanes; ++i) out[i] = widen(from[i]);
    return out;
}
#endif

// The first `count` of sixteen, and zeros.
template <class T>
inline Floats load(const T* from, int count) {
    if (count >= kLanes) return load(from);
    float line[kLanes] = {};
    for (int i = 0; i < count; ++i) line[i] = widen(from[i]);
    return load(line);
}

inline Floats all(float value) { return Floats{} + value; }

inline void store(float* to, Floats values) { memcpy(to, &values, sizeof values); }

// To the nearest, ties to even; a NaN stays one.
inline void store(bf16* to, Floats values) {
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
    const auto halves = _mm512_cvtneps_pbh((__m512)values);
    memcpy(static_cast<void*>(to), &halves, sizeof halves);
#else
    for (int i = 0; i < kLanes; ++i) to[i] = round_to<bf16>(values[i]);
#endif
}

template <class T>
inline void store(T* to, Floats values, int count) {
    if (count >= kLanes) return store(to, values);
    for (int i = 0; i < count; ++i) to[i] = round_to<T>(values[i]);
}

// Calls `run` with null pointers that tell types: of what is computed in, bfloat16 if `half` and else float; and of the
// cache's elements: the same, or by `eighth` 1 e4m3 and 2 e5m2.
template <class Run>
inline void by_types(int half, int eighth, Run run) {
    const auto by_cache = [&](auto* number) {
        switch (eighth) {
            case 1: run(number, static_cast<e4m3*>(nullptr)); break;
            case 2: run(number, static_cast<e5m2*>(nullptr)); break;
            default: run(number, number); break;
        }
    };
    if (half)
        by_cache(static_cast<bf16*>(nullptr));
    else
        by_cache(static_cast<float*>(nullptr));
}

// e^x to 2e-7 of its value for x <= 87, 0 or nearly below -87; NaN for NaN.
inline Floats exponential(Floats x) {
#ifdef __AVX512F__
    const __m512 least_x = _mm512_max_ps(_mm512_set1_ps(-104.0f), (__m512)x);  // of a NaN and a number, the second
    const __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(least_x, _mm512_set1_ps(1.44269504089f)), 8);
    __m512 rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), least_x);
    rest = _mm512_fmadd_ps(whole, _mm512_set1_ps(2.12194440e-4f), rest);
    __m512 power = _mm512_fmadd_ps(_mm512_set1_ps(1.0f / 5040), rest, _mm512_set1_ps(1.0f / 720));
    for (const float term : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(term));
    return (Floats)_mm512_scalef_ps(power, whole);
#else
    const Floats low = x < -87.0f ? all(-87.0f) : x;
    const Floats n = low * 1.44269504089f + 12582912.0f - 12582912.0f;  // 1.5 * 2^23: rounds to a whole number
    const Floats r = (low - n * 0.693359375f) + n * 2.12194440e-4f;
    Floats sum = all(1.0f / 5040);
    sum = sum * r + 1.0f / 720;
    sum = sum * r + 1.0f / 120;
    sum = sum * r + 1.0f / 24;
    sum = sum * r + 1.0f / 6;
    sum = sum * r + 0.5f;
    sum = sum * r + 1.0f;
    sum = sum * r + 1.0f;
    const Signed exponent = __builtin_convertvector(n, Signed) + 127;
    const Signed bits = exponent << 23;
    Floats power;
    memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? Floats{} : sum * power;
#endif
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// x / (1 + e^-x); NaN for NaN. Beyond 87 the exponential would be too small for a normal number, and slow.
inline Floats silu(Floats x) { return x / (1.0f + exponential(larger(-larger(x, all(-87.0f)), all(-87.0f)))); }

inline float highest_of(Floats values) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)values);
#else
    float highest = values[0];
    for (int i = 1; i < kLanes; ++i) highest = values[i] > highest ? values[i] : highest;
    return highest;
#endif
}

inline float sum_of(Floats values) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)values);
#else
    float sum = 0.0f;
    for (int i = 0; i < kLanes; ++i) sum += values[i];
    return sum;
#endif
}

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
