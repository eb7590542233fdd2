// y = x @ weight.T + bias in bfloat16, with the weight packed once for the CPU's dot-product units.
//
// Packed form: tiles of 16 outputs by 32 inputs, [N/16][K/32][16][16][2], each tile one KiB and in the order in which it
// is read. A tile is both what AMX wants as its second operand and 16 vectors for vdpbf16ps. With AMX each output is
// summed in the same order however many rows there are: a row's result does not depend on the others of the batch.

#include "vectors.h"

#if defined(__AVX512BF16__) && defined(__AVX512VL__)
#define KVF_DOT 1
#endif
#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define KVF_AMX 1
#endif

namespace {

constexpr int kOutputs = 16;              // of a tile
constexpr int kInputs = 32;               // of a tile
constexpr int kTile = kOutputs * kInputs;  // elements
constexpr int kAhead = 8;                 // tiles that are fetched ahead: memory answers later than one tile takes

#ifdef KVF_DOT

inline void write(const float* sums, const bf16* bias, bf16* out, int outputs) {
    if (outputs == kOutputs) {
        const __m512 shift = bias ? (__m512)load(bias) : _mm512_setzero_ps();
        const auto half = (__m256i)_mm512_cvtneps_pbh(_mm512_add_ps(_mm512_loadu_ps(sums), shift));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), half);
        return;
    }
    for (int n = 0; n < outputs; ++n) out[n] = round_to<bf16>(sums[n] + (bias ? widen(bias[n]) : 0.0f));
}

// Rows of x for one tile column, by vdpbf16ps.
template <int R>
void dot_rows(const bf16* x, const bf16* packed, const bf16* bias, bf16* y, int64_t K, int64_t stride, int outputs) {
    __m512 sums[R];
    for (int r = 0; r < R; ++r) sums[r] = _mm512_setzero_ps();
    for (int64_t k = 0; k < K; k += 2, packed += 2 * kOutputs) {
        const __m512bh w = (__m512bh)_mm512_loadu_si512(packed);
        _mm_prefetch(reinterpret_cast<const char*>(packed + kAhead * kTile), _MM_HINT_T0);
        for (int r = 0; r < R; ++r) {
            int32_t pair;
            __builtin_memcpy(&pair, x + r * K + k, sizeof pair);
            sums[r] = _mm512_dpbf16_ps(sums[r], w, (__m512bh)_mm512_set1_epi32(pair));
        }
    }
    for (int r = 0; r < R; ++r) {
        alignas(64) float line[kOutputs];
        _mm512_store_ps(line, sums[r]);
        write(line, bias, y + r * stride, outputs);
    }
}

void dot_panel(const bf16* x, const bf16* packed, const bf16* bias, bf16* y, int64_t M, int64_t K, int64_t stride,
               int outputs) {
    int64_t m = 0;
    for (; m + 8 <= M; m += 8) dot_rows<8>(x + m * K, packed, bias, y + m * stride, K, stride, outputs);
    for (; m + 4 <= M; m += 4) dot_rows<4>(x + m * K, packed, bias, y + m * stride, K, stride, outputs);
    for (; m < M; ++m) dot_rows<1>(x + m * K, packed, bias, y + m * stride, K, stride, outputs);
}

#endif
#ifdef KVF_AMX

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t columns[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0 1 2 3: sums; 4 5: rows of x; 6 7: the weight.
void configure(int upper, int lower) {
    TileConfig config;
    const int rows[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
    for (int tile = 0; tile < 8; ++tile) {
        config.columns[tile] = 64;
        config.rows[tile] = static_cast<uint8_t>(rows[tile]);
    }
    _tile_loadconfig(&config);
}

inline void fetch(const bf16* tile) {
    const char* line = reinterpret_cast<const char*>(tile + kAhead * kTile);
    for (int at = 0; at < 1024; at += 64) _mm_prefetch(line + at, _MM_HINT_T0);
}

// Up to 16 rows, two tile columns.
void amx_narrow(const bf16* x, const bf16* first, const bf16* second, float* sums, int64_t K) {
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t k = 0; k < K; k += kInputs, first += kTile, second += kTile) {
        fetch(first);
        fetch(second);
        _tile_loadd(4, x + k, K * 2);
        _tile_loadd(6, first, 64);
        _tile_loadd(7, second, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
}

// 17 to 32 rows, two tile columns.
void amx_wide(const bf16* x, const bf16* first, const bf16* second, float* sums, int64_t K) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < K; k += kInputs, first += kTile, second += kTile) {
        _tile_loadd(4, x + k, K * 2);
        _tile_loadd(6, first, 64);
        _tile_loadd(7, second, 64);
        _tile_loadd(5, x + 16 * K + k, K * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
}

#endif

}  // namespace

// 0: this CPU has neither; 1: vdpbf16ps; 2: AMX, which the kernel has granted.
extern "C" int kvf_linear_kind() {
#if defined(KVF_AMX)
    constexpr long request_permission = 0x1023, tile_data = 18;
    static const bool granted = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
    if (granted) return 2;
#endif
#if defined(KVF_DOT)
    return 1;
#else
    return 0;
#endif
}

// Pack weight [N, K] into [ceil(N / 16), ceil(K / 32), 16, 16, 2], padded with zeros.
extern "C" void kvf_linear_pack(const bf16* weight, bf16* packed, int64_t N, int64_t K) {
    const int64_t columns = (K + kInputs - 1) / kInputs;
    for (int64_t n = 0; n < N; ++n)
        for (int64_t k = 0; k < K; ++k) {
            bf16* tile = packed + ((n / kOutputs) * columns + k / kInputs) * kTile;
            tile[((k % kInputs) / 2) * 2 * kOutputs + (n % kOutputs) * 2 + k % 2] = weight[n * K + k];
        }
}

// y [M, N] = x [M, K] @ weight.T + bias, K a multiple of 32; `kind` as kvf_linear_kind says.
extern "C" void kvf_linear(int kind, const bf16* x, const bf16* packed, const bf16* bias, bf16* y, int64_t M, int64_t N,
                           int64_t K, int threads) {
#ifdef KVF_DOT
    const int64_t panels = (N + kOutputs - 1) / kOutputs, pairs = (panels + 1) / 2, size = K * kOutputs;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t pair = 0; pair < pairs; ++pair) {
        const int64_t n = pair * 2 * kOutputs;
        const int outputs[2] = {static_cast<int>(least(kOutputs, N - n)),
                                static_cast<int>(least(kOutputs, N - n - kOutputs))};
        const bf16* first = packed + 2 * pair * size;
        const bf16* second = outputs[1] > 0 ? first + size : first;
#ifdef KVF_AMX
        if (kind == 2) {
            alignas(64) float sums[4 * 256];
            for (int64_t m = 0; m < M; m += 32) {
                const int rows = static_cast<int>(least(32, M - m));
                if (m == 0 || rows < 32) configure(static_cast<int>(least(rows, 16)), rows > 16 ? rows - 16 : 1);
                (rows > 16 ? amx_wide : amx_narrow)(x + m * K, first, second, sums, K);
                for (int row = 0; row < rows; ++row)
                    for (int half = 0; half < 2 && outputs[half] > 0; ++half)
                        write(sums + (row / 16) * 512 + half * 256 + (row % 16) * 16,
                              bias ? bias + n + half * kOutputs : nullptr, y + (m + row) * N + n + half * kOutputs,
                              outputs[half]);
            }
            _tile_release();
            continue;
        }
#endif
        dot_panel(x, first, bias ? bias + n : nullptr, y + n, M, K, N, outputs[0]);
        if (outputs[1] > 0)
            dot_panel(x, second, bias ? bias + n + kOutputs : nullptr, y + n + kOutputs, M, K, N, outputs[1]);
    }
#endif
}
