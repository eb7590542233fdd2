// y = x @ weight.T + bias in bfloat16, with the weight packed once for the CPU's dot-product units.
//
// Packed form: panels of 16 outputs, [N/16][K/32][16][16][2]: tiles of 16 outputs by 32 inputs, each one KiB and in the
// order in which it is read. A tile is both what AMX wants as its second operand and 16 vectors for vdpbf16ps. With AMX
// each output is summed in the same order however many rows there are: a row's result does not depend on the others of
// the batch.
//
// A unit of work is 32 rows by a pair of panels, the most that AMX's eight tiles take. What its sums become is computed
// while the next unit's products run. Of the two operands the one that is used again stays in the nearest cache: the
// other is loaded past it, which is worth a third of the time.

#include "tape.h"
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
constexpr int kRows = 32;                  // of a unit

#ifdef KVF_DOT

constexpr int kSecond = 256;  // floats from a row's sums of the first panel to those of the second

// Where the sums of a pair of panels go.
struct Target {
    bf16* y;  // of the first row, the first panel's first output
    int64_t stride;
    const bf16 *first_bias, *second_bias;
    int first, second;  // outputs of each panel; none of the second in an odd one
    bool gated;         // one output per pair: SiLU of the first panel's times the second's
};

inline Floats shifted(const float* sums, const bf16* bias, int outputs) {
    return bias ? load(sums) + load(bias, outputs) : load(sums);
}

inline void finish(const Target& to, const float* sums, int64_t row) {
    bf16* y = to.y + row * to.stride;
    const Floats first = shifted(sums, to.first_bias, to.first);
    if (to.second <= 0) return store(y, first, to.first);
    const Floats second = shifted(sums + kSecond, to.second_bias, to.second);
    if (to.gated) return store(y, silu(first) * second, to.first);
    if (to.second < kOutputs) {
        store(y, first);
        return store(y + kOutputs, second, to.second);
    }
    _mm512_storeu_si512(y, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
}

// R rows of x times a panel, by vdpbf16ps. A row's sums are the same whatever R is.
template <int R>
void dot_rows(const bf16* x, const bf16* panel, int64_t K, float* to) {
    // Memory answers later than a tile takes. With more rows a core asks slower than the nearest cache would have it: what
    // has been asked for then waits in the second, and not for one of the few places for lines on their way.
    constexpr bool near = R <= 6;
    constexpr int ahead = (near ? 8 : 16) * kTile;
    __m512 sums[R];
    for (int r = 0; r < R; ++r) sums[r] = _mm512_setzero_ps();
    for (int64_t k = 0; k < K; k += 2, panel += 2 * kOutputs) {
        const __m512bh w = (__m512bh)_mm512_loadu_si512(panel);
        _mm_prefetch(reinterpret_cast<const char*>(panel + ahead), near ? _MM_HINT_T0 : _MM_HINT_T1);
        for (int r = 0; r < R; ++r) {
            int32_t pair;
            __builtin_memcpy(&pair, x + r * K + k, sizeof pair);
            sums[r] = _mm512_dpbf16_ps(sums[r], w, (__m512bh)_mm512_set1_epi32(pair));
        }
    }
    for (int r = 0; r < R; ++r) _mm512_storeu_ps(to + r * kOutputs, sums[r]);
}

template <int R>
void dot_unit(const bf16* x, const bf16* first, const bf16* second, int64_t K, const Target& to, int64_t row) {
    alignas(64) float sums[2 * kSecond];
    dot_rows<R>(x + row * K, first, K, sums);
    if (to.second > 0) dot_rows<R>(x + row * K, second, K, sums + kSecond);
    for (int r = 0; r < R; ++r) finish(to, sums + r * kOutputs, row + r);
}

constexpr decltype(&dot_unit<1>) kUnits[] = {dot_unit<1>, dot_unit<2>, dot_unit<3>, dot_unit<4>,  dot_unit<5>,  dot_unit<6>,
                                             dot_unit<7>, dot_unit<8>, dot_unit<9>, dot_unit<10>, dot_unit<11>, dot_unit<12>};

// All rows, in units as equal as can be: one of few rows takes as long as one of seven, for each sum waits for the one
// before it, and from nine on the addresses of the rows take more than their share.
void dot_pair(const bf16* x, const bf16* first, const bf16* second, int64_t M, int64_t K, const Target& to) {
    const int64_t most = M <= 12 ? 12 : M <= 24 ? 9 : 8;
    int64_t row = 0;
    for (int64_t left = (M + most - 1) / most; left > 0; --left) {
        const int64_t rows = (M - row + left - 1) / left;
        kUnits[rows - 1](x, first, second, K, to, row);
        row += rows;
    }
}

#endif
#ifdef KVF_AMX

constexpr int64_t kMostInputs = 640;      // of a pair of panels, so that they stay in the nearest cache
constexpr int kKept = 4;                  // units whose sums stay there too, where K is cut
constexpr int64_t kMostRowBytes = 768 << 10;  // of x, so that all pairs find it in the second cache

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t columns[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0 1 2 3: sums; 4 5: rows of x; 6 7: the weight.
void configure(int rows) {
    TileConfig config;
    const int upper = rows < 16 ? rows : 16, lower = rows > 16 ? rows - 16 : 1;
    const int of_tile[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
    for (int tile = 0; tile < 8; ++tile) {
        config.columns[tile] = 64;
        config.rows[tile] = static_cast<uint8_t>(of_tile[tile]);
    }
    asm volatile("" ::: "memory");  // GCC knows of the first eight bytes only that they are read
    _tile_loadconfig(&config);
}

// Sums that wait to be finished: [2 halves of the rows][2 panels][16][16].
struct Waiting {
    const float* sums = nullptr;
    Target to = {};
    int next = 0, rows = 0;

    void some(int count) {
        for (; count > 0 && next < rows; --count, ++next)
            finish(to, sums + next / 16 * 2 * kSecond + next % 16 * kOutputs, next);
    }
};

// Multiplies K inputs of a unit. again: `sums` has what earlier inputs gave. rows_stay: what is loaded past the nearest
// cache is the weight and not x. to: where the outputs go after these inputs; null before the last.
template <bool rows_stay>
void amx_unit(const bf16* x, int64_t stride, const bf16* first, const bf16* second, int64_t K, int rows, bool again,
              float* sums, Waiting& waiting, const Target* to) {
    int fetched = to ? 0 : rows;
    if (again) {
        _tile_loadd(0, sums, 64);
        _tile_loadd(1, sums + 256, 64);
    } else {
        _tile_zero(0);
        _tile_zero(1);
    }
    if (rows > 16) {
        if (again) {
            _tile_loadd(2, sums + 512, 64);
            _tile_loadd(3, sums + 768, 64);
        } else {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t k = 0; k < K; k += kInputs, first += kTile, second += kTile) {
            if (rows_stay) {
                _tile_loadd(4, x + k, stride * 2);
                _tile_stream_loadd(6, first, 64);
                _tile_stream_loadd(7, second, 64);
                _tile_loadd(5, x + 16 * stride + k, stride * 2);
            } else {
                _tile_stream_loadd(4, x + k, stride * 2);
                _tile_loadd(6, first, 64);
                _tile_loadd(7, second, 64);
                _tile_stream_loadd(5, x + 16 * stride + k, stride * 2);
            }
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            waiting.some(2);
            for (int i = 0; i < 2 && fetched < rows; ++i, ++fetched)  // else the stores wait, and loads for them
                __builtin_prefetch(to->y + fetched * to->stride, 1);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    } else {
        for (int64_t k = 0; k < K; k += kInputs, first += kTile, second += kTile) {
            _tile_loadd(4, x + k, stride * 2);
            _tile_stream_loadd(6, first, 64);
            _tile_stream_loadd(7, second, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            waiting.some(1);
        }
    }
    waiting.some(kRows);
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    if (rows > 16) {
        _tile_stored(2, sums + 512, 64);
        _tile_stored(3, sums + 768, 64);
    }
}

// Buffers and the state between units of one thread.
class AmxRows {
  public:
    explicit AmxRows(int64_t K) : K_(K) {
        const int64_t cuts = (K + kMostInputs - 1) / kMostInputs;
        cut_ = (K + cuts * kInputs - 1) / (cuts * kInputs) * kInputs;
    }

    // `rows` rows of x times a pair.
    void pair(const bf16* x, const bf16* first, const bf16* second, int64_t rows, const Target& to) {
        for (int64_t group = 0; group < rows; group += kKept * kRows) {
            const int64_t end = least(rows, group + kKept * kRows);
            for (int64_t k = 0; k < K_; k += cut_)
                for (int64_t row = group; row < end; row += kRows) {
                    const int count = static_cast<int>(least(kRows, rows - row));
                    const bool last = k + cut_ >= K_;
                    float* sums = K_ > cut_ ? kept_[turn_ * kKept + (row - group) / kRows] : kept_[turn_];
                    if (count != configured_) configure(configured_ = count);
                    Target unit = to;
                    unit.y += row * to.stride;
                    (rows <= kRows ? amx_unit<true> : amx_unit<false>)(
                        x + row * K_ + k, K_, first + k * kOutputs, second + k * kOutputs, least(cut_, K_ - k), count,
                        k > 0, sums, waiting_, last ? &unit : nullptr);
                    if (!last) continue;
                    waiting_ = Waiting{sums, unit, 0, count};
                    if (K_ == cut_) turn_ ^= 1;
                }
            if (K_ > cut_) turn_ ^= 1;
        }
    }

    void end() {
        waiting_.some(kRows);
        _tile_release();
    }

  private:
    int64_t K_, cut_;
    int configured_ = 0, turn_ = 0;
    Waiting waiting_;
    alignas(64) float kept_[2 * kKept][4 * 256];
};

#endif
#ifdef KVF_DOT

void multiply(int kind, const bf16* x, const bf16* packed, const bf16* bias, bf16* y, int64_t M, int64_t N, int64_t K,
              bool gated, int threads) {
    const int64_t outputs = gated ? N / 2 : N, step = gated ? kOutputs : 2 * kOutputs;
    const int64_t pairs = (outputs + step - 1) / step, size = K * kOutputs;
    const int64_t apart = gated ? outputs : kOutputs;  // from a panel's outputs to those of the other of its pair
    const auto target = [&](int64_t pair, int64_t row) {
        const int64_t n = pair * step, left = outputs - n;
        const int first = static_cast<int>(least(kOutputs, left));
        const int second = gated ? first : static_cast<int>(least(kOutputs, left - kOutputs));
        const bf16 *first_bias = bias ? bias + n : nullptr, *second_bias = bias ? bias + n + apart : nullptr;
        return Target{y + row * outputs + n, outputs, first_bias, second_bias, first, second, gated};
    };
    const auto panel = [&](int64_t pair, int64_t second) { return packed + (2 * pair + second) * size; };
#ifdef KVF_AMX
    if (kind == 2) {
        const int64_t group = kKept * kRows, fitting = kMostRowBytes / (2 * K) / group * group;
        const int64_t most = fitting > group ? fitting : group;
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            AmxRows rows(K);
            for (int64_t row = 0; row < M; row += most)
#pragma omp for schedule(static) nowait
                for (int64_t pair = 0; pair < pairs; ++pair) {
                    const Target to = target(pair, row);
                    rows.pair(x + row * K, panel(pair, 0), panel(pair, to.second > 0), least(most, M - row), to);
                }
            rows.end();
        }
        return;
    }
#endif
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t pair = 0; pair < pairs; ++pair) {
        const Target to = target(pair, 0);
        dot_pair(x, panel(pair, 0), panel(pair, to.second > 0), M, K, to);
    }
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

// Pack weight [N, K] into panels, `step` of them from one to the next; the zeros there are its padding.
extern "C" void kvf_linear_pack(const bf16* weight, bf16* packed, int64_t N, int64_t K, int64_t step) {
    const int64_t columns = (K + kInputs - 1) / kInputs;
    for (int64_t n = 0; n < N; ++n)
        for (int64_t k = 0; k < K; ++k) {
            bf16* tile = packed + ((n / kOutputs) * step * columns + k / kInputs) * kTile;
            tile[((k % kInputs) / 2) * 2 * kOutputs + (n % kOutputs) * 2 + k % 2] = weight[n * K + k];
        }
}

// y [M, N] = x [M, K] @ weight.T + bias, K a multiple of 32; `kind` as kvf_linear_kind says.
extern "C" void kvf_linear(int kind, const bf16* x, const bf16* packed, const bf16* bias, bf16* y, int64_t M, int64_t N,
                           int64_t K, int threads) {
    perform([=] {
#ifdef KVF_DOT
        multiply(kind, x, packed, bias, y, M, N, K, false, threads);
#endif
    });
}

// y [M, N / 2] = SiLU of the first half of what kvf_linear gives times the second, in float32 between. The panels of the
// two halves take turns.
extern "C" void kvf_gated_linear(int kind, const bf16* x, const bf16* packed, const bf16* bias, bf16* y, int64_t M,
                                 int64_t N, int64_t K, int threads) {
    perform([=] {
#ifdef KVF_DOT
        multiply(kind, x, packed, bias, y, M, N, K, true, threads);
#endif
    });
}
