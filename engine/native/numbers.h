// Element types of the cache, and arithmetic that the compiler turns into vectors.

#pragma once

#include <cmath>
#include <cstdint>

struct bf16 {
    uint16_t bits;
};

// Eight-bit floats. Seven bits of magnitude, in which the exponent is smaller than a float's by kBias.
struct e4m3 {
    static constexpr int kShift = 20, kBias = 120;
    static constexpr float kLargest = 448.0f, kSmallestNormal = 0x1p-6f;
    uint8_t code;
};

struct e5m2 {
    static constexpr int kShift = 21, kBias = 112;
    static constexpr float kLargest = 57344.0f, kSmallestNormal = 0x1p-14f;
    uint8_t code;
};

inline float widen(float value) { return value; }

inline float widen(bf16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float wide;
    __builtin_memcpy(&wide, &bits, sizeof wide);
    return wide;
}

inline uint32_t bits_of(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float widen(e4m3 value) {
    const uint32_t magnitude = value.code & 0x7fu, bits = magnitude << e4m3::kShift;
    float wide;
    __builtin_memcpy(&wide, &bits, sizeof wide);
    wide = magnitude == 0x7fu ? NAN : wide * 0x1p120f;
    return value.code & 0x80u ? -wide : wide;
}

inline float widen(e5m2 value) {
    const uint32_t magnitude = value.code & 0x7fu, bits = magnitude << e5m2::kShift;
    float wide;
    __builtin_memcpy(&wide, &bits, sizeof wide);
    wide = magnitude > 0x7cu ? NAN : magnitude == 0x7cu ? INFINITY : wide * 0x1p112f;
    return value.code & 0x80u ? -wide : wide;
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

// To the nearest, ties to even, within what the type can hold; a NaN stays one.
template <class C>
inline C narrow(float value) {
    const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu, largest = bits_of(C::kLargest);
    const uint32_t held = magnitude < largest ? magnitude : largest;
    const uint32_t half_less = (1u << (C::kShift - 1)) - 1u;
    const uint32_t normal = ((held + half_less + ((held >> C::kShift) & 1u)) >> C::kShift) -
                            (static_cast<uint32_t>(C::kBias) << (23 - C::kShift));
    float small;  // with what makes the last bit of a float the type's own smallest step, so that the sum rounds to it
    __builtin_memcpy(&small, &held, sizeof small);
    constexpr float kBase = C::kSmallestNormal * static_cast<float>(1u << C::kShift);
    const uint32_t steps = bits_of(small + kBase) - bits_of(kBase);
    const uint32_t code = held < bits_of(C::kSmallestNormal) ? steps : normal;
    return C{static_cast<uint8_t>((magnitude > 0x7f800000u ? 0x7fu : code) | ((bits >> 24) & 0x80u))};
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
