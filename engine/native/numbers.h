// Element types of the cache, and arithmetic that the compiler turns into vectors.

#pragma once

#include <cstdint>

struct bf16 {
    uint16_t bits;
};

inline float widen(float value) { return value; }

inline float widen(bf16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float wide;
    __builtin_memcpy(&wide, &bits, sizeof wide);
    return wide;
}

template <class T>
T round_to(float value);

template <>
inline float round_to<float>(float value) {
    return value;
}

// To the nearest, ties to even; a NaN stays one.
template <>
inline bf16 round_to<bf16>(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return bf16{static_cast<uint16_t>(value != value ? 0x7fc0u : rounded)};
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
