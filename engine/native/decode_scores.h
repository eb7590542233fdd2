// Scores of one query token per head over tokens of its context: in floats, by vdpbf16ps or by AMX.

#pragma once

#include <cstring>
#include <type_traits>

#include "vectors.h"

#if defined(__AVX512BF16__) && defined(__AVX512VL__)
#define KVF_DOT 1
#endif
#if defined(KVF_DOT) && defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__)
#define KVF_AMX 1
#endif

namespace {

constexpr int kMostHeads = 4;    // query heads that go along a KV head in registers
constexpr int kMostChunks = 16;  // of sixteen elements, of a head
constexpr int kMost = 16;        // query heads that go along a sequence together

// Where the tokens of a run lie.
template <class C>
struct Run {
    const C *k, *v;
    int tokens;
};

struct Shape {
    int64_t kv_heads, group, dim, block_size, stride;  // stride: elements from token to token
    int chunks;
    float scale, softcap;
};

// What the heads of a task ask for: as floats, and as the CPU's products take it where they are used.
struct Queries {
    Floats wide[kMost * kMostChunks];
    alignas(64) bf16 halves[kMost][kMostChunks * kLanes];                 // [head][dim]
    alignas(64) uint32_t packed[kMost][kMostChunks / 2][16][kMostHeads];  // [heads of four][dim / 32][pair][head]
    int kind = 0;  // 0: floats; 1: vdpbf16ps; 2: AMX
};

// Calls `run` with a number that is known when compiling, 1 to 4.
template <class Call>
void by_heads(int heads, Call call) {
    switch (heads) {
        case 1: call(std::integral_constant<int, 1>()); break;
        case 2: call(std::integral_constant<int, 2>()); break;
        case 3: call(std::integral_constant<int, 3>()); break;
        default: call(std::integral_constant<int, 4>()); break;
    }
}

// Scores of G heads of [G][chunks] over up to sixteen tokens, not scaled yet; anything beyond.
template <class C, int G>
void dots(const Floats* q, const Run<C>& run, const Shape& shape, float (*scores)[kLanes]) {
    Floats lines[G][kLanes] = {};
    for (int t = 0; t < run.tokens; ++t) {
        Floats sums[G] = {};
        for (int c = 0; c < shape.chunks; ++c) {
            const Floats key = load(run.k + t * shape.stride + c * kLanes, static_cast<int>(shape.dim) - c * kLanes);
            for (int g = 0; g < G; ++g) sums[g] += q[g * shape.chunks + c] * key;
        }
        for (int g = 0; g < G; ++g) lines[g][t] = sums[g];
    }
    for (int g = 0; g < G; ++g) sum_lines(lines[g], scores[g]);
}

#ifdef KVF_DOT

// The same, where all is in bfloat16 and a head a multiple of 32 elements.
template <int G>
void half_dots(const bf16 (*q)[kMostChunks * kLanes], const Run<bf16>& run, const Shape& shape,
               float (*scores)[kLanes]) {
    Floats lines[G][kLanes] = {};
    for (int t = 0; t < run.tokens; ++t) {
        const bf16* key = run.k + t * shape.stride;
        __m512 sums[G] = {};
        for (int64_t i = 0; i < shape.dim; i += 2 * kLanes) {
            const __m512bh pairs = (__m512bh)_mm512_loadu_si512(key + i);
            for (int g = 0; g < G; ++g)
                sums[g] = _mm512_dpbf16_ps(sums[g], (__m512bh)_mm512_load_si512(q[g] + i), pairs);
        }
        for (int g = 0; g < G; ++g) lines[g][t] = (Floats)sums[g];
    }
    for (int g = 0; g < G; ++g) sum_lines(lines[g], scores[g]);
}

#endif
#ifdef KVF_AMX

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t columns[16] = {16, 16, 64, 64, 16, 16};  // bytes. Tiles 0 1: sums; 2 3: of K; 4 5: of the queries
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16};
};

// The same of up to four heads over sixteen tokens.
void tiled_dots(const uint32_t (*packed)[16][kMostHeads], const Run<bf16>& run, const Shape& shape, int heads,
                float (*scores)[kLanes]) {
    alignas(64) float sums[2][kLanes][kMostHeads];
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t part = 0; part < shape.dim / 32; part += 2) {
        _tile_stream_loadd(2, run.k + part * 32, shape.stride * 2);
        _tile_loadd(4, packed[part], 16);
        _tile_dpbf16ps(0, 2, 4);
        if (part + 1 == shape.dim / 32) break;
        _tile_stream_loadd(3, run.k + (part + 1) * 32, shape.stride * 2);
        _tile_loadd(5, packed[part + 1], 16);
        _tile_dpbf16ps(1, 3, 5);
    }
    _tile_stored(0, sums[0], 16);
    _tile_stored(1, sums[1], 16);
    asm volatile("" ::: "memory");  // the compiler does not know what tiles are stored to
    __m512 fours[4];
    for (int i = 0; i < 4; ++i) fours[i] = _mm512_add_ps((__m512)load(sums[0][4 * i]), (__m512)load(sums[1][4 * i]));
    for (int g = 0; g < heads; ++g) {
        const __m512i order =
            _mm512_add_epi32(_mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 28, 24, 20, 16, 12, 8, 4, 0), _mm512_set1_epi32(g));
        const __m512 low = _mm512_permutex2var_ps(fours[0], order, fours[1]);
        const __m512 high = _mm512_permutex2var_ps(fours[2], order, fours[3]);
        _mm512_storeu_ps(scores[g], _mm512_insertf32x8(low, _mm512_castps512_ps256(high), 1));
    }
}

#endif

// Of `heads` heads from `first` on, as the queries say; `scores` has a line for each head of a task.
template <class C>
void score(const Queries& queries, int first, int heads, const Run<C>& run, const Shape& shape,
           float (*scores)[kLanes]) {
#ifdef KVF_AMX
    if constexpr (std::is_same_v<C, bf16>)
        if (queries.kind == 2 && run.tokens == kLanes)
            return tiled_dots(queries.packed[first], run, shape, heads, scores + first);
#endif
#ifdef KVF_DOT
    if constexpr (std::is_same_v<C, bf16>)
        if (queries.kind == 1)
            return by_heads(heads, [&](auto count) {
                half_dots<count()>(queries.halves + first, run, shape, scores + first);
            });
#endif
    by_heads(heads, [&](auto count) {
        dots<C, count()>(queries.wide + first * shape.chunks, run, shape, scores + first);
    });
}

}  // namespace
