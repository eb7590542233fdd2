// Attention of one query token per sequence over its blocks, where they lie. All query heads that share a KV head go
// along it together, so that each byte of K and V is read from memory once. The softmax is online (Milakov and
// Gimelshein, 2018), in float32. Eight-bit elements are widened on their way; their scales are in the score's, and in the
// result's. No slot beyond a sequence's end is read, and none before the window's first.

#include <cmath>
#include <type_traits>

#include "vectors.h"

namespace {

constexpr int kMostHeads = 4;    // query heads that go along a KV head in registers
constexpr int kMostChunks = 16;  // of sixteen elements, of a head
constexpr int kMost = 16;        // query heads that go along a sequence together

struct Running {
    float highest = -INFINITY, sum = 0.0f;
    Floats out[kMostChunks] = {};
};

// One run of up to sixteen tokens, G heads. q: [G][chunks] of Floats. softcap: 0 for none.
template <class C, int G>
void attend_run(const Floats* q, const C* k, const C* v, int tokens, int dim, int64_t stride, float softcap,
                Running* running) {
    const int chunks = (dim + kLanes - 1) / kLanes;
    Floats lines[G][kLanes] = {};
    for (int t = 0; t < tokens; ++t) {
        Floats sums[G] = {};
        for (int c = 0; c < chunks; ++c) {
            const Floats key = load(k + t * stride + c * kLanes, dim - c * kLanes);
            for (int g = 0; g < G; ++g) sums[g] += q[g * chunks + c] * key;
        }
        for (int g = 0; g < G; ++g) lines[g][t] = sums[g];
    }
    float weights[G][kLanes], rescale[G];
    for (int g = 0; g < G; ++g) {
        float scores[kLanes];
        sum_lines(lines[g], scores);
        if (softcap > 0.0f)
            for (int t = 0; t < tokens; ++t) scores[t] = softcap * std::tanh(scores[t] / softcap);
        for (int t = tokens; t < kLanes; ++t) scores[t] = -INFINITY;
        const Floats row = load(scores);
        const float most = highest_of(row), before = running[g].highest;
        const float highest = most > before ? most : before;
        const Floats raised = exponential(row - highest);
        store(weights[g], raised);
        rescale[g] = highest == before ? 1.0f : std::exp(before - highest);
        running[g].sum = running[g].sum * rescale[g] + sum_of(raised);
        running[g].highest = highest;
    }
    for (int c = 0; c < chunks; ++c) {
        Floats out[G];
        for (int g = 0; g < G; ++g) out[g] = running[g].out[c] * rescale[g];
        for (int t = 0; t < tokens; ++t) {
            const Floats value = load(v + t * stride + c * kLanes, dim - c * kLanes);
            for (int g = 0; g < G; ++g) out[g] += weights[g][t] * value;
        }
        for (int g = 0; g < G; ++g) running[g].out[c] = out[g];
    }
}

template <class C>
void attend_group(const Floats* q, const C* k, const C* v, int tokens, int dim, int64_t stride, float softcap,
                  int group, Running* running) {
    const int chunks = (dim + kLanes - 1) / kLanes;
    while (group > 0) {
        const int heads = group < kMostHeads ? group : kMostHeads;
        switch (heads) {
            case 1: attend_run<C, 1>(q, k, v, tokens, dim, stride, softcap, running); break;
            case 2: attend_run<C, 2>(q, k, v, tokens, dim, stride, softcap, running); break;
            case 3: attend_run<C, 3>(q, k, v, tokens, dim, stride, softcap, running); break;
            default: attend_run<C, 4>(q, k, v, tokens, dim, stride, softcap, running); break;
        }
        q += heads * chunks;
        running += heads;
        group -= heads;
    }
}

template <class C>
void fetch(const C* k, const C* v, int64_t tokens, int64_t dim, int64_t stride) {
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t at = 0; at < dim; at += 64 / static_cast<int64_t>(sizeof(C))) {
            __builtin_prefetch(k + t * stride + at);
            __builtin_prefetch(v + t * stride + at);
        }
}

template <class T, class C>
void attend(const T* q, const C* k_cache, const C* v_cache, const int64_t* rows, const int32_t* tables,
            const int32_t* lengths, T* out, int64_t sequences, int64_t width, int64_t q_stride, int64_t kv_heads,
            int64_t group, int64_t dim, int64_t block_size, const int64_t* strides, float scale, int64_t window,
            float softcap, float v_scale, int threads) {
    const int chunks = static_cast<int>((dim + kLanes - 1) / kLanes);
    // KV heads that go along a sequence together: they lie beside each other. One each where few sequences are to keep
    // the threads busy.
    const int64_t together = sequences < 2 * threads || group > kMost ? 1 : least(kv_heads, kMost / group);
    const int64_t parts = (kv_heads + together - 1) / together;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1 && sequences * parts > 1)
    for (int64_t task = 0; task < sequences * parts; ++task) {
        const int64_t sequence = task / parts, head = task % parts * together, length = lengths[sequence];
        const int64_t kv_count = least(together, kv_heads - head);
        const int64_t begin = window > 0 && length > window ? length - window : 0;
        const int32_t* table = tables + sequence * width;
        const T* query = q + rows[sequence] * q_stride + head * group * dim;
        T* result = out + (rows[sequence] * kv_heads + head) * group * dim;
        const auto place = [&](int64_t at, int64_t kv) {
            return table[at / block_size] * strides[0] + (head + kv) * strides[2];
        };
        for (int64_t first = 0; first < group; first += kMost) {
            const int heads = static_cast<int>(least(group - first, kMost));
            const int all_heads = heads * static_cast<int>(kv_count);
            Floats wide[kMost * kMostChunks];
            Running running[kMost];
            for (int g = 0; g < all_heads; ++g)
                for (int c = 0; c < chunks; ++c)
                    wide[g * chunks + c] =
                        load(query + (first + g) * dim + c * kLanes, static_cast<int>(dim) - c * kLanes) * scale;
            for (int64_t at = begin / block_size * block_size; at < length; at += block_size) {
                const int64_t tokens = least(block_size, length - at), left = length - at - block_size;
                for (int64_t kv = 0; kv < kv_count; ++kv) {
                    if (left > 0) {
                        const int64_t next = place(at + block_size, kv);
                        fetch(k_cache + next, v_cache + next, least(block_size, left), dim, strides[1]);
                    }
                    const int64_t here = place(at, kv);
                    for (int64_t t = begin > at ? begin - at : 0; t < tokens; t += kLanes)
                        attend_group(wide + kv * heads * chunks, k_cache + here + t * strides[1],
                                     v_cache + here + t * strides[1], static_cast<int>(least(kLanes, tokens - t)),
                                     static_cast<int>(dim), strides[1], softcap, heads, running + kv * heads);
                }
            }
            for (int g = 0; g < all_heads; ++g)
                for (int64_t i = 0; i < dim; ++i)
                    result[(first + g) * dim + i] =
                        round_to<T>(running[g].out[i / kLanes][i % kLanes] / running[g].sum * v_scale);
        }
    }
}

}  // namespace

// out [T, kv_heads * group, dim] at `rows`, of q [T, ...] with `q_stride` elements from token to token.
// tables: [sequences, width]. strides: as kvf_rope_store's. dim <= 256. window: tokens that are seen, 0 for all. softcap:
// of the scores, 0 for none. half, eighth: see by_types. scale: with K's own; v_scale: V's own.
extern "C" void kvf_paged_decode(int half, int eighth, const void* q, const void* k_cache, const void* v_cache,
                                 const int64_t* rows, const int32_t* tables, const int32_t* lengths, void* out,
                                 int64_t sequences, int64_t width, int64_t q_stride, int64_t kv_heads, int64_t group,
                                 int64_t dim, int64_t block_size, const int64_t* strides, float scale,
                                 int64_t window, float softcap, float v_scale, int threads) {
    by_types(half, eighth, [&](auto* number, auto* element) {
        using T = std::remove_pointer_t<decltype(number)>;
        using C = std::remove_pointer_t<decltype(element)>;
        attend(static_cast<const T*>(q), static_cast<const C*>(k_cache), static_cast<const C*>(v_cache), rows, tables,
               lengths, static_cast<T*>(out), sequences, width, q_stride, kv_heads, group, dim, block_size, strides,
               scale, window, softcap, v_scale, threads);
    });
}
