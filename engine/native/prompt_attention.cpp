// Causal attention of a chunk of one sequence's tokens over its blocks, on AMX in bfloat16.
//
// K is gathered as it is and V transposed, once per KV head and chunk. Then, for sixteen queries at a time, the scores
// are computed with the tokens as rows and the queries as columns, S^T = K Q^T: K needs no packing that way, and the
// softmax runs down the columns, in vectors of sixteen queries without one horizontal sum. Its result is already what
// AMX wants as second operand of O^T = V^T P^T.

#include <cmath>
#include <initializer_list>
#include <type_traits>

#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BF16__)
#define KVF_AMX 1

namespace {

constexpr int kRows = 16, kStep = 32;  // of a tile; tokens that one product sums over
constexpr int kRun = 256;              // tokens whose scores are held at once
constexpr int kMostElements = 256;     // of a head

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t columns[16] = {};
    uint8_t rows[16] = {};
    TileConfig() {
        for (int tile = 0; tile < 8; ++tile) columns[tile] = 64, rows[tile] = 16;
    }
};

struct Context {
    bf16* k;  // [padded, dim]
    bf16* v;  // [padded / 32, dim, 32]: a tile is one run of memory
    int64_t length, padded, dim;
};

inline void copy_line(bf16* to, const bf16* from, int64_t dim) {
    memcpy(static_cast<void*>(to), from, dim * sizeof(bf16));
}

template <class C>
inline void copy_line(bf16* to, const C* from, int64_t dim) {
    for (int64_t i = 0; i < dim; i += kLanes) store(to + i, load(from + i));
}

template <class C>
void gather(const Context& to, const C* k_cache, const C* v_cache, const int32_t* table, int64_t head,
            int64_t block_size, const int64_t* strides) {
    alignas(64) bf16 rows[kStep][kMostElements];
    const __m512i apart = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 30, 28, 26, 24, 22,
                                           20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i lines = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                             _mm512_set1_epi32(kMostElements * sizeof(bf16)));
    for (int64_t first = 0; first < to.padded; first += kStep) {
        for (int64_t t = 0; t < kStep; ++t) {
            const int64_t token = first + t, size = to.dim * static_cast<int64_t>(sizeof(bf16));
            if (token >= to.length) {  // zeros, not what happens to lie there: a weight of zero does not stop a NaN
                memset(static_cast<void*>(to.k + token * to.dim), 0, size);
                memset(static_cast<void*>(rows[t]), 0, size);
                continue;
            }
            const int64_t place =
                table[token / block_size] * strides[0] + token % block_size * strides[1] + head * strides[2];
            copy_line(to.k + token * to.dim, k_cache + place, to.dim);
            copy_line(rows[t], v_cache + place, to.dim);
        }
        for (int64_t i = 0; i < to.dim; i += 2)
            for (int64_t t = 0; t < kStep; t += kRows) {  // sixteen tokens' pairs of elements, then the pairs apart
                const __m512i pairs = _mm512_i32gather_epi32(lines, &rows[t][i], 1);
                const __m512i both = _mm512_permutexvar_epi16(apart, pairs);
                bf16* line = to.v + first * to.dim + i * kStep + t;
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(line), _mm512_castsi512_si256(both));
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(line + kStep), _mm512_extracti64x4_epi64(both, 1));
            }
    }
}

// 2^x for x <= 0 to 5e-5 of its value: its use is to be rounded to bfloat16, which loses forty times that. NaN for NaN.
inline Floats power_of_two(Floats x) {
    const __m512 low = _mm512_max_ps(_mm512_set1_ps(-150.0f), (__m512)x);
    const __m512 whole = _mm512_roundscale_ps(low, 8), rest = _mm512_sub_ps(low, whole);
    __m512 power = _mm512_set1_ps(0.0096181291f);
    for (const float term : {0.0555041087f, 0.2402265070f, 0.6931471806f, 1.0f})
        power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(term));
    return (Floats)_mm512_scalef_ps(power, whole);
}

// Sixteen queries of one head, of which `count` are there, the first at position `start`. Scores stay in the nearest
// cache: the softmax is online over runs of tokens.
void attend(const Context& context, const bf16* q, int64_t q_stride, int count, int64_t start, float scale, float v_scale,
            bf16* out, int64_t out_stride) {
    alignas(64) uint32_t packed[kMostElements / kStep][16][16] = {};  // [dim / 32][pair of elements][query]
    alignas(64) float scores[kRun][16];                               // [token][query]
    alignas(64) bf16 weights[kRun / 2][16][2];                        // [pair of tokens][query]
    alignas(64) float turned[kMostElements][16] = {};                 // [dim][query]
    const int64_t dim = context.dim, seen = start + count;
    for (int query = 0; query < count; ++query)
        for (int64_t pair = 0; pair < dim / 2; ++pair)
            memcpy(&packed[pair / 16][pair % 16][query], q + query * q_stride + 2 * pair, 4);
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                           5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    Floats sums = {}, highest = all(-INFINITY);
    const float base = scale * 1.44269504089f;  // e^(scale * x) is 2^(base * x)

    for (int64_t first = 0; first < seen; first += kRun) {
        const int64_t tokens = least(kRun, (seen - first + kStep - 1) / kStep * kStep);
        for (int64_t token = 0; token < tokens; token += kStep) {
            _tile_zero(0);
            _tile_zero(1);
            const bf16* k = context.k + (first + token) * dim;
            for (int64_t part = 0; part < dim / kStep; ++part) {
                _tile_loadd(6, packed[part], 64);
                _tile_loadd(4, k + part * kStep, dim * 2);
                _tile_loadd(5, k + kRows * dim + part * kStep, dim * 2);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 5, 6);
            }
            _tile_stored(0, scores[token], 64);
            _tile_stored(1, scores[token + kRows], 64);
        }

        // Query c sees tokens 0 to start + c: the first start + 1 are seen by all.
        const Floats before = highest;
        for (int64_t token = 0; token < tokens; ++token) {
            Floats row = load(scores[token]);
            if (first + token > start) {
                const auto blind = static_cast<__mmask16>((1u << least(16, first + token - start)) - 1u);
                row = (Floats)_mm512_mask_mov_ps((__m512)row, blind, _mm512_set1_ps(-INFINITY));
                store(scores[token], row);
            }
            highest = larger(row, highest);
        }
        const Floats rescale = power_of_two((before - highest) * base);
        sums *= rescale;
        const Floats shift = highest * base;
        for (int64_t token = 0; token < tokens; token += 2) {
            const Floats even = power_of_two(load(scores[token]) * base - shift);
            const Floats odd = power_of_two(load(scores[token + 1]) * base - shift);
            const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
            _mm512_storeu_si512(weights[token / 2], _mm512_permutexvar_epi16(order, both));
            sums += even + odd;
        }

        for (int64_t i = 0; i < dim; i += 2 * kRows) {
            if (first > 0)
                for (int64_t row = i; row < i + 2 * kRows; ++row) store(turned[row], load(turned[row]) * rescale);
            _tile_loadd(0, turned[i], 64);
            _tile_loadd(1, turned[i + kRows], 64);
            for (int64_t token = 0; token < tokens; token += kStep) {
                const bf16* v = context.v + (first + token) * dim + i * kStep;
                _tile_loadd(6, weights[token / 2], 64);
                _tile_loadd(4, v, 64);
                _tile_loadd(5, v + kRows * kStep, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 5, 6);
            }
            _tile_stored(0, turned[i], 64);
            _tile_stored(1, turned[i + kRows], 64);
        }
    }
    for (int query = 0; query < count; ++query)
        for (int64_t i = 0; i < dim; ++i) out[query * out_stride + i] = round_to<bf16>(turned[i][query] / sums[query] * v_scale);
}

}  // namespace
#endif

// out [count, heads * dim] of q [count, ...] with `q_stride` elements from token to token; q is the last `count` tokens of
// a sequence of `length`. work: the caller's, 64-byte aligned, 2 * dim * P elements, P being `length` rounded up to 32.
// dim: a multiple of 32, at most 256. strides: as kvf_rope_store's. eighth: see by_types. scale: with K's own; v_scale:
// V's own.
extern "C" void kvf_prompt_attention(int eighth, const bf16* q, const void* k_cache, const void* v_cache,
                                     const int32_t* table, bf16* work, bf16* out, int64_t count, int64_t length, int64_t q_stride,
                                     int64_t kv_heads, int64_t group, int64_t dim, int64_t block_size,
                                     const int64_t* strides, float scale, float v_scale, int threads) {
#ifdef KVF_AMX
    const int64_t padded = (length + kStep - 1) / kStep * kStep, tiles = (count + 15) / 16;
    const Context context{work, work + dim * padded, length, padded, dim};
    for (int64_t head = 0; head < kv_heads; ++head) {
        by_types(1, eighth, [&](auto*, auto* element) {
            using C = std::remove_pointer_t<decltype(element)>;
            gather(context, static_cast<const C*>(k_cache), static_cast<const C*>(v_cache), table, head, block_size,
                   strides);
        });
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            const TileConfig config;
            _tile_loadconfig(&config);
#pragma omp for schedule(dynamic)
            for (int64_t task = tiles * group - 1; task >= 0; --task) {
                const int64_t first = task / group * 16, query_head = head * group + task % group;
                attend(context, q + first * q_stride + query_head * dim, q_stride,
                       static_cast<int>(least(16, count - first)), length - count + first, scale, v_scale,
                       out + (first * kv_heads * group + query_head) * dim, kv_heads * group * dim);
            }
            _tile_release();
        }
    }
#endif
}
