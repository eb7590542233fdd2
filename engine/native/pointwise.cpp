// What stands between the matrix products of a layer, each in one pass over memory. Sums and products are in float32.

#include <cmath>
#include <type_traits>

#include "tape.h"
#include "vectors.h"

namespace {

// Elements from which on another thread helps: for fewer, waking it takes longer than the work.
constexpr int64_t kWorthSharing = 1 << 16;

template <class T>
void add_rms_norm(T* x, const T* delta, const T* weight, T* out, int64_t tokens, int64_t size, float eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && tokens * size >= kWorthSharing)
    for (int64_t token = 0; token < tokens; ++token) {
        T* row = x + token * size;
        float sum = 0.0f;
        if (delta)
#pragma omp simd
            for (int64_t i = 0; i < size; ++i) row[i] = round_to<T>(widen(row[i]) + widen(delta[token * size + i]));
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < size; ++i) sum += widen(row[i]) * widen(row[i]);
        const float factor = 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) out[token * size + i] = round_to<T>(widen(row[i]) * factor * widen(weight[i]));
    }
}

template <class T>
void silu_and_mul(const T* gate_up, T* out, int64_t tokens, int64_t size, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && tokens * size >= kWorthSharing)
    for (int64_t token = 0; token < tokens; ++token) {
        const T *gate = gate_up + token * 2 * size, *up = gate + size;
        for (int64_t i = 0; i < size; i += kLanes) {
            const int count = static_cast<int>(least(kLanes, size - i));
            store(out + token * size + i, silu(load(gate + i, count)) * load(up + i, count), count);
        }
    }
}

template <class T>
inline void rotate(const T* from, T* to, const T* cos, const T* sin, int64_t half) {
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
        const float a = widen(from[i]), b = widen(from[half + i]), c = widen(cos[i]), s = widen(sin[i]);
        to[i] = round_to<T>(a * c - b * s);
        to[half + i] = round_to<T>(b * c + a * s);
    }
}

template <class T, class C>
inline void keep(const T* from, C* to, int64_t dim, float inverse) {
#pragma omp simd
    for (int64_t i = 0; i < dim; ++i) to[i] = narrow<C>(widen(from[i]) * inverse);
}

template <class T, class C>
void rope_store(T* qkv, const T* cos, const T* sin, const int64_t* slots, C* k_cache, C* v_cache, int64_t tokens,
                int64_t heads, int64_t kv_heads, int64_t dim, int64_t block_size, const int64_t* strides,
                float k_inverse, float v_inverse, int threads) {
    const int64_t size = (heads + 2 * kv_heads) * dim;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && tokens * size >= kWorthSharing)
    for (int64_t token = 0; token < tokens; ++token) {
        T* row = qkv + token * size;
        const T *c = cos + token * dim / 2, *s = sin + token * dim / 2;
        const int64_t place =
            slots[token] / block_size * strides[0] + slots[token] % block_size * strides[1];
        for (int64_t head = 0; head < heads; ++head) rotate(row + head * dim, row + head * dim, c, s, dim / 2);
        row += heads * dim;
        for (int64_t head = 0; head < kv_heads; ++head) {
            T *k = row + head * dim, *v = row + (kv_heads + head) * dim;
            C *k_to = k_cache + place + head * strides[2], *v_to = v_cache + place + head * strides[2];
            if constexpr (std::is_same_v<T, C>) {
                rotate(k, k_to, c, s, dim / 2);
                memcpy(static_cast<void*>(v_to), v, dim * sizeof(T));
            } else {
                rotate(k, k, c, s, dim / 2);
                keep(k, k_to, dim, k_inverse);
                keep(v, v_to, dim, v_inverse);
            }
        }
    }
}

}  // namespace

// x += delta (where there is one), then out = x / rms(x) * weight, of [tokens, size].
extern "C" void kvf_add_rms_norm(int half, void* x, const void* delta, const void* weight, void* out, int64_t tokens,
                                 int64_t size, float eps, int threads) {
    perform([=] {
        if (half)
            add_rms_norm(static_cast<bf16*>(x), static_cast<const bf16*>(delta), static_cast<const bf16*>(weight),
                         static_cast<bf16*>(out), tokens, size, eps, threads);
        else
            add_rms_norm(static_cast<float*>(x), static_cast<const float*>(delta), static_cast<const float*>(weight),
                         static_cast<float*>(out), tokens, size, eps, threads);
    });
}

// out [tokens, size] = silu(first half) * second half, of gate_up [tokens, 2 * size].
extern "C" void kvf_silu_and_mul(int half, const void* gate_up, void* out, int64_t tokens, int64_t size, int threads) {
    perform([=] {
        if (half)
            silu_and_mul(static_cast<const bf16*>(gate_up), static_cast<bf16*>(out), tokens, size, threads);
        else
            silu_and_mul(static_cast<const float*>(gate_up), static_cast<float*>(out), tokens, size, threads);
    });
}

// Turn q of qkv [tokens, heads + 2 * kv_heads, dim] in place, and k on its way to the cache, where v goes as it is.
// strides: elements from block to block, token to token and head to head of the cache. half, eighth: see by_types; in an
// eight-bit cache K and V are kept times their inverses, and k is turned in qkv as well.
extern "C" void kvf_rope_store(int half, int eighth, void* qkv, const void* cos, const void* sin, const int64_t* slots,
                               void* k_cache, void* v_cache, int64_t tokens, int64_t heads, int64_t kv_heads,
                               int64_t dim, int64_t block_size, const int64_t* strides, float k_inverse,
                               float v_inverse, int threads) {
    perform([=] {
        by_types(half, eighth, [&](auto* number, auto* element) {
            using T = std::remove_pointer_t<decltype(number)>;
            using C = std::remove_pointer_t<decltype(element)>;
            rope_store(static_cast<T*>(qkv), static_cast<const T*>(cos), static_cast<const T*>(sin), slots,
                       static_cast<C*>(k_cache), static_cast<C*>(v_cache), tokens, heads, kv_heads, dim, block_size, strides,
                       k_inverse, v_inverse, threads);
        });
    });
}
