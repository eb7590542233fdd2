// Causal attention of a chunk of one sequence's tokens over its blocks, in bfloat16, by AMX or by vdpbf16ps.
//
// K is gathered as it is and V transposed, once per KV head and chunk. Then, for 32 queries at a time, the scores are
// computed with the tokens as rows and the queries as columns, S^T = K Q^T: K needs no packing that way, and the
// softmax runs down the columns, in vectors of sixteen queries without one horizontal sum. Its result is already what
// both want as second operand of O^T = V^T P^T. K and V come by, past the nearest cache; all else stays in it.

#include <cmath>
#include <initializer_list>
#include <type_traits>

#include "tape.h"
#include "vectors.h"

#if defined(__AVX512BF16__) && defined(__AVX512VL__)
#define KVF_DOT 1
#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
#define KVF_AMX 1
#endif

namespace {

constexpr int kRows = 16, kStep = 32;  // of a tile; tokens that one product sums over
constexpr int kRun = 128;              // tokens whose scores are held at once
constexpr int kQueries = 32;           // that go along the context together: two columns of tiles
constexpr int kMostElements = 256;     // of a head

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

// The 32 tokens from `first` on.
template <class C>
void gather(const Context& to, int64_t first, const C* k_cache, const C* v_cache, const int32_t* table, int64_t head,
            int64_t block_size, const int64_t* strides) {
    alignas(64) bf16 rows[kStep][kMostElements];
    const __m512i apart = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 30, 28, 26, 24, 22,
                                           20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i lines = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                             _mm512_set1_epi32(kMostElements * sizeof(bf16)));
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

// 2^x for x <= 0 to 5e-5 of its value: its use is to be rounded to bfloat16, which loses forty times that. NaN for NaN.
inline Floats power_of_two(Floats x) {
    const __m512 low = _mm512_max_ps(_mm512_set1_ps(-150.0f), (__m512)x);
    const __m512 whole = _mm512_roundscale_ps(low, 8), rest = _mm512_sub_ps(low, whole);
    __m512 power = _mm512_set1_ps(0.0096181291f);
    for (const float term : {0.0555041087f, 0.2402265070f, 0.6931471806f, 1.0f})
        power = _mm512_fmadd_ps(power, rest, _mm512_set1_ps(term));
    return (Floats)_mm512_scalef_ps(power, whole);
}

// The compiler does not know what tiles are loaded from: what was written stays written, and before.
inline void written() { asm volatile("" ::: "memory"); }

// Brings sixteen numbers and sixteen more together in pairs.
alignas(64) constexpr int16_t kPairs[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                            8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

// Sixteen queries on their way along the context.
struct Column {
    alignas(64) uint32_t packed[kMostElements / kStep][16][16];  // [dim / 32][pair of elements][query]
    alignas(64) float scores[kRun][16];                          // [token][query]
    alignas(64) bf16 weights[kRun / 2][16][2];                   // [pair of tokens][query]
    alignas(64) float turned[kMostElements][16];                 // [dim][query]
    Floats sums = {}, highest = all(-INFINITY);

    void begin(const bf16* q, int64_t stride, int count, int64_t dim) {
        memset(packed, 0, dim / 2 * sizeof packed[0][0]);
        memset(turned, 0, dim * sizeof turned[0]);
        for (int query = 0; query < count; ++query)
            for (int64_t pair = 0; pair < dim / 2; ++pair)
                memcpy(&packed[pair / 16][pair % 16][query], q + query * stride + 2 * pair, 4);
    }

    // Scores of `tokens` from `first` on into weights. Query c sees tokens 0 to start + c. The softmax is online.
    void weigh(int64_t first, int64_t tokens, int64_t start, float base, int64_t dim) {
        const __m512i order = _mm512_load_si512(kPairs);
        const Floats before = highest;
        for (int64_t token = start + 1 > first ? start + 1 - first : 0; token < tokens; ++token) {
            const auto blind = static_cast<__mmask16>((1u << least(16, first + token - start)) - 1u);
            const __m512 row = (__m512)load(scores[token]);
            store(scores[token], (Floats)_mm512_mask_mov_ps(row, blind, _mm512_set1_ps(-INFINITY)));
        }
        __m512 most[4];  // of a NaN and a number, the second
        for (auto& part : most) part = (__m512)highest;
        for (int64_t token = 0; token < tokens; token += 4)
            for (int i = 0; i < 4; ++i) most[i] = _mm512_max_ps((__m512)load(scores[token + i]), most[i]);
        highest = (Floats)_mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
        const Floats rescale = power_of_two((before - highest) * base);
        sums *= rescale;
        const Floats shift = highest * base;
        Floats evens = {}, odds = {};
        for (int64_t token = 0; token < tokens; token += 2) {
            const Floats even = power_of_two(load(scores[token]) * base - shift);
            const Floats odd = power_of_two(load(scores[token + 1]) * base - shift);
            const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
            _mm512_storeu_si512(weights[token / 2], _mm512_permutexvar_epi16(order, both));
            evens += even;
            odds += odd;
        }
        sums += evens + odds;
        if (first > 0)
            for (int64_t i = 0; i < dim; ++i) store(turned[i], load(turned[i]) * rescale);
    }

    void finish(bf16* out, int64_t stride, int count, int64_t dim, float v_scale) const {
        const __m512i order = _mm512_load_si512(kPairs);
        alignas(64) uint32_t pairs[kRows];
        for (int64_t i = 0; i < dim; i += 2) {
            const Floats even = load(turned[i]) / sums * v_scale, odd = load(turned[i + 1]) / sums * v_scale;
            const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
            _mm512_store_si512(pairs, _mm512_permutexvar_epi16(order, both));
            for (int query = 0; query < count; ++query) memcpy(static_cast<void*>(out + query * stride + i), pairs + query, 4);
        }
    }
};

// The products by vdpbf16ps: eight rows, which are broadcast, times one or two columns.
struct Dots {
    static constexpr int kTogether = 8;

    static void begin() {}
    static void end() {}

    // Adds the products of `pairs` pairs of elements to the sums.
    template <bool both>
    static void multiply(__m512 (*sums)[kTogether], const bf16* rows, int64_t stride, const void* first,
                         const void* second, int64_t pairs) {
        for (int64_t pair = 0; pair < pairs; ++pair) {
            const __m512bh left = (__m512bh)_mm512_load_si512(static_cast<const __m512i*>(first) + pair);
            const __m512bh right = (__m512bh)_mm512_load_si512(static_cast<const __m512i*>(both ? second : first) + pair);
            for (int r = 0; r < kTogether; ++r) {
                int32_t element;
                memcpy(&element, rows + r * stride + 2 * pair, sizeof element);
                const __m512bh row = (__m512bh)_mm512_set1_epi32(element);
                sums[0][r] = _mm512_dpbf16_ps(sums[0][r], left, row);
                if (both) sums[1][r] = _mm512_dpbf16_ps(sums[1][r], right, row);
            }
        }
    }

    template <bool both>
    static void score(Column* columns, const bf16* k, int64_t tokens, int64_t dim) {
        for (int64_t token = 0; token < tokens; token += kTogether) {
            __m512 sums[1 + both][kTogether] = {};
            multiply<both>(sums, k + token * dim, dim, columns[0].packed, columns[both].packed, dim / 2);
            for (int at = 0; at <= both; ++at)
                for (int r = 0; r < kTogether; ++r) store(columns[at].scores[token + r], (Floats)sums[at][r]);
        }
    }

    template <bool both>
    static void add_values(Column* columns, const bf16* v, int64_t tokens, int64_t dim) {
        for (int64_t i = 0; i < dim; i += kTogether) {
            __m512 sums[1 + both][kTogether];
            for (int at = 0; at <= both; ++at)
                for (int r = 0; r < kTogether; ++r) sums[at][r] = (__m512)load(columns[at].turned[i + r]);
            for (int64_t token = 0; token < tokens; token += kStep)
                multiply<both>(sums, v + token * dim + i * kStep, kStep, columns[0].weights[token / 2],
                               columns[both].weights[token / 2], kStep / 2);
            for (int at = 0; at <= both; ++at)
                for (int r = 0; r < kTogether; ++r) store(columns[at].turned[i + r], (Floats)sums[at][r]);
        }
    }
};

#ifdef KVF_AMX

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t columns[16] = {};
    uint8_t rows[16] = {};
    TileConfig() {
        for (int tile = 0; tile < 8; ++tile) columns[tile] = 64, rows[tile] = 16;
    }
};

// The same by AMX. Tiles 0 1: sums of the first column; 2 3: of the second; 4 5: of K or V; 6 7: of the columns.
struct Tiles {
    static void begin() {
        const TileConfig config;
        written();
        _tile_loadconfig(&config);
    }

    static void end() { _tile_release(); }

    template <bool both>
    static void score(Column* columns, const bf16* k, int64_t tokens, int64_t dim) {
        for (int64_t token = 0; token < tokens; token += kStep, k += kStep * dim) {
            _tile_zero(0);
            _tile_zero(1);
            if (both) {
                _tile_zero(2);
                _tile_zero(3);
            }
            for (int64_t part = 0; part < dim / kStep; ++part) {
                _tile_stream_loadd(4, k + part * kStep, dim * 2);
                _tile_stream_loadd(5, k + kRows * dim + part * kStep, dim * 2);
                _tile_loadd(6, columns[0].packed[part], 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 5, 6);
                if (!both) continue;
                _tile_loadd(7, columns[1].packed[part], 64);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, columns[0].scores[token], 64);
            _tile_stored(1, columns[0].scores[token + kRows], 64);
            if (!both) continue;
            _tile_stored(2, columns[1].scores[token], 64);
            _tile_stored(3, columns[1].scores[token + kRows], 64);
        }
    }

    template <bool both>
    static void add_values(Column* columns, const bf16* v, int64_t tokens, int64_t dim) {
        for (int64_t i = 0; i < dim; i += 2 * kRows) {
            _tile_loadd(0, columns[0].turned[i], 64);
            _tile_loadd(1, columns[0].turned[i + kRows], 64);
            if (both) {
                _tile_loadd(2, columns[1].turned[i], 64);
                _tile_loadd(3, columns[1].turned[i + kRows], 64);
            }
            for (int64_t token = 0; token < tokens; token += kStep) {
                const bf16* tile = v + token * dim + i * kStep;
                _tile_stream_loadd(4, tile, 64);
                _tile_stream_loadd(5, tile + kRows * kStep, 64);
                _tile_loadd(6, columns[0].weights[token / 2], 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 5, 6);
                if (!both) continue;
                _tile_loadd(7, columns[1].weights[token / 2], 64);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, columns[0].turned[i], 64);
            _tile_stored(1, columns[0].turned[i + kRows], 64);
            if (!both) continue;
            _tile_stored(2, columns[1].turned[i], 64);
            _tile_stored(3, columns[1].turned[i + kRows], 64);
        }
    }
};

#endif

// Up to 32 queries of one head, the first at position `start`.
template <class Products, bool both>
void attend(const Context& context, const bf16* q, int64_t q_stride, int count, int64_t start, float scale,
            float v_scale, bf16* out, int64_t out_stride) {
    const int64_t dim = context.dim, seen = start + count;
    const float base = scale * 1.44269504089f;  // e^(scale * x) is 2^(base * x)
    const int counts[2] = {both ? kRows : count, count - kRows};
    Column columns[both ? 2 : 1];
    for (int at = 0; at <= both; ++at) columns[at].begin(q + at * kRows * q_stride, q_stride, counts[at], dim);
    written();
    for (int64_t first = 0; first < seen; first += kRun) {
        const int64_t tokens = least(kRun, (seen - first + kStep - 1) / kStep * kStep);
        Products::template score<both>(columns, context.k + first * dim, tokens, dim);
        for (int at = 0; at <= both; ++at) columns[at].weigh(first, tokens, start + at * kRows, base, dim);
        written();
        Products::template add_values<both>(columns, context.v + first * dim, tokens, dim);
    }
    for (int at = 0; at <= both; ++at)
        columns[at].finish(out + at * kRows * out_stride, out_stride, counts[at], dim, v_scale);
}

// A whole chunk; the arguments are those of kvf_prompt_attention.
template <class Products>
void attend_all(int eighth, const bf16* q, const void* k_cache, const void* v_cache, const int32_t* table,
                const Context& context, bf16* out, int64_t count, int64_t q_stride, int64_t kv_heads, int64_t group,
                int64_t block_size, const int64_t* strides, float scale, float v_scale, int threads) {
    const int64_t dim = context.dim, tiles = (count + kQueries - 1) / kQueries;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Products::begin();
        for (int64_t head = 0; head < kv_heads; ++head) {
#pragma omp for schedule(static)
            for (int64_t first = 0; first < context.padded; first += kStep)
                by_types(1, eighth, [&](auto*, auto* element) {
                    using C = std::remove_pointer_t<decltype(element)>;
                    gather(context, first, static_cast<const C*>(k_cache), static_cast<const C*>(v_cache), table, head,
                           block_size, strides);
                });
#pragma omp for schedule(dynamic)
            for (int64_t task = tiles * group - 1; task >= 0; --task) {
                const int64_t first = task / group * kQueries, query_head = head * group + task % group;
                const int queries = static_cast<int>(least(kQueries, count - first));
                (queries > kRows ? attend<Products, true> : attend<Products, false>)(
                    context, q + first * q_stride + query_head * dim, q_stride, queries, context.length - count + first,
                    scale, v_scale, out + (first * kv_heads * group + query_head) * dim, kv_heads * group * dim);
            }
        }
        Products::end();
    }
}

}  // namespace
#endif

// out [count, heads * dim] of q [count, ...] with `q_stride` elements from token to token; q is the last `count` tokens of
// a sequence of `length`. kind: as kvf_linear_kind says, not 0. work: the caller's, 64-byte aligned, 2 * dim * P elements,
// P being `length` rounded up to 32. dim: a multiple of 32, at most 256. strides: as kvf_rope_store's. eighth: see
// by_types. scale: with K's own; v_scale: V's own.
extern "C" void kvf_prompt_attention(int kind, int eighth, const bf16* q, const void* k_cache, const void* v_cache,
                                     const int32_t* table, bf16* work, bf16* out, int64_t count, int64_t length, int64_t q_stride,
                                     int64_t kv_heads, int64_t group, int64_t dim, int64_t block_size,
                                     const int64_t* strides, float scale, float v_scale, int threads) {
    perform([=] {
#ifdef KVF_DOT
        const int64_t padded = (length + kStep - 1) / kStep * kStep;
        const Context context{work, work + dim * padded, length, padded, dim};
        auto* run = attend_all<Dots>;
#ifdef KVF_AMX
        if (kind == 2) run = attend_all<Tiles>;
#endif
        run(eighth, q, k_cache, v_cache, table, context, out, count, q_stride, kv_heads, group, block_size, strides, scale,
            v_scale, threads);
#endif
    });
}
