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

// e^x to 2e-7 of its value, for x <= 88; NaN for NaN.
inline float exponential(float x) {
    const float low = x < -87.0f ? -87.0f : x;
    const float scaled = low * 1.44269504089f;
    const int32_t whole = static_cast<int32_t>(scaled + (scaled < 0 ? -0.5f : 0.5f));
    const float n = static_cast<float>(whole);
    const float r = (low - n * 0.693359375f) + n * 2.12194440e-4f;
    float sum = 1.0f / 5040;
    sum = sum * r + 1.0f / 720;
    sum = sum * r + 1.0f / 120;
    sum = sum * r + 1.0f / 24;
    sum = sum * r + 1.0f / 6;
    sum = sum * r + 0.5f;
    sum = sum * r + 1.0f;
    sum = sum * r + 1.0f;
    const int32_t bits = static_cast<int32_t>(static_cast<uint32_t>(whole + 127) << 23);
    float power;
    __builtin_memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : sum * power;
}
