// Attention of one query token per sequence over its blocks, where they lie. All query heads that share a KV head go
// along it together, so that each byte of K and V is read from memory once. The softmax is online (Milakov and
// Gimelshein, 2018), in float32. Eight-bit elements are widened on their way; their scales are in the score's, and in the
// result's. No slot beyond a sequence's end is read, and none before the window's first.
//
// A sequence is cut into parts of kPart tokens, whatever else is in the batch, which threads take as they come; what came
// of the parts is put together in their order (flash decoding, Dao et al., 2023). So a sequence's result does not depend
// on the others. Of a part, sixteen tokens at a time: the scores of all heads, by AMX or vdpbf16ps where there are any;
// their weights; and the values, during which the next sixteen are asked for.

#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "decode_scores.h"
#include "tape.h"
#include "vectors.h"

namespace {

constexpr int kScoring = 4;      // pieces of what comes next that are asked for with the scores of a KV head,
constexpr int kWeighing = 2;     // and with a head's weights; the others with the values
constexpr int kPart = 128;       // tokens of a task; a multiple of sixteen

struct Running {
    float highest = -INFINITY;
    Floats sums = {};
    Floats out[kMostChunks] = {};
};

// What comes next of K and V, asked for piece by piece in the order in which it lies, so that the hardware sees where it
// goes and runs ahead: a core alone waits for no more lines at a time than hide half of the memory's latency.
struct Ahead {
    const char *k, *v;       // of the row that is due
    int64_t rows, stride;    // rows that are left; bytes from one to the next
    int64_t size, done;      // bytes of a row
    int64_t piece;           // bytes to ask for at a time

    void step() {
        if (rows <= 0) return;
        for (int64_t at = done; at < done + piece; at += 64) {
            __builtin_prefetch(k + at, 0, 2);
            __builtin_prefetch(v + at, 0, 2);
        }
        done += piece;
        if (done < size) return;
        done = 0;
        k += stride;
        v += stride;
        --rows;
    }

    void steps(int count) {
        for (int i = 0; i < count && rows > 0; ++i) step();
    }
};

// Scores to weights; returns by how much what came before is less.
inline float weigh(float* scores, int tokens, const Shape& shape, Running& running) {
    const Signed lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Floats row = load(scores) * shape.scale;
    if (shape.softcap > 0.0f)
        for (int t = 0; t < tokens; ++t) row[t] = shape.softcap * std::tanh(row[t] / shape.softcap);
    row = lane < tokens ? row : all(-INFINITY);
    const float most = highest_of(row), before = running.highest;
    const float highest = most > before ? most : before;
    const Floats raised = exponential(row - highest);
    store(scores, raised);
    const float rescale = highest == before ? 1.0f : std::exp(before - highest);
    running.sums = running.sums * rescale + raised;
    running.highest = highest;
    return rescale;
}

// N chunks of the values, from chunk `c` on, of G heads.
template <class C, int G, int N, bool fetches>
void add_values(const Run<C>& run, const Shape& shape, int c, const float (*weights)[kLanes], const float* rescale,
                Ahead& ahead, Running* running) {
    const int left = static_cast<int>(shape.dim) - c * kLanes;
    Floats out[G][N];
    for (int g = 0; g < G; ++g)
        for (int n = 0; n < N; ++n) out[g][n] = running[g].out[c + n] * rescale[g];
    for (int t = 0; t < run.tokens; ++t) {
        if (fetches) ahead.step();
        const C* from = run.v + t * shape.stride + c * kLanes;
        Floats values[N];
        for (int n = 0; n < N; ++n)
            values[n] = N > 1 ? load(from + n * kLanes) : load(from, left);
        for (int g = 0; g < G; ++g)
            for (int n = 0; n < N; ++n) out[g][n] += weights[g][t] * values[n];
    }
    for (int g = 0; g < G; ++g)
        for (int n = 0; n < N; ++n) running[g].out[c + n] = out[g][n];
}

template <class C, int G>
void add_all_values(const Run<C>& run, const Shape& shape, const float (*weights)[kLanes], const float* rescale,
                    bool fetches, Ahead& ahead, Running* running) {
    constexpr int together = 4;  // chunks: with four heads, half of the registers
    int c = 0;
    if (shape.dim < together * kLanes && fetches) {
        add_values<C, G, 1, true>(run, shape, c++, weights, rescale, ahead, running);
    } else if (fetches) {
        add_values<C, G, together, true>(run, shape, c, weights, rescale, ahead, running);
        c += together;
    }
    for (; (c + together) * kLanes <= shape.dim; c += together)
        add_values<C, G, together, false>(run, shape, c, weights, rescale, ahead, running);
    for (; c < shape.chunks; ++c) add_values<C, G, 1, false>(run, shape, c, weights, rescale, ahead, running);
}

#ifdef KVF_DOT

// N vectors of 32 values, from element `i` on, of G heads, two tokens at a time. The sums stand in the order in which
// unpacking leaves the elements, until in_order().
template <int G, int N, bool fetches>
void add_half_values(const Run<bf16>& run, int64_t stride, int64_t i, const float (*weights)[kLanes],
                     const float* rescale, Ahead& ahead, Running* running) {
    alignas(32) int32_t pairs[G][kLanes / 2];
    __m512 out[G][2 * N];
    for (int g = 0; g < G; ++g) {
        store(reinterpret_cast<bf16*>(pairs[g]), load(weights[g]));
        for (int n = 0; n < 2 * N; ++n) out[g][n] = (__m512)(running[g].out[i / kLanes + n] * rescale[g]);
    }
    for (int t = 0; t < run.tokens; t += 2) {
        // A token that has no other goes with itself: the other's weight is zero.
        const bf16 *even = run.v + t * stride + i, *odd = t + 1 < run.tokens ? even + stride : even;
        if (fetches) ahead.steps(2);
        __m512bh values[2 * N];
        for (int n = 0; n < N; ++n) {
            const __m512i one = _mm512_loadu_si512(even + 2 * n * kLanes), other = _mm512_loadu_si512(odd + 2 * n * kLanes);
            values[2 * n] = (__m512bh)_mm512_unpacklo_epi16(one, other);
            values[2 * n + 1] = (__m512bh)_mm512_unpackhi_epi16(one, other);
        }
        for (int g = 0; g < G; ++g) {
            const __m512bh weight = (__m512bh)_mm512_set1_epi32(pairs[g][t / 2]);
            for (int n = 0; n < 2 * N; ++n) out[g][n] = _mm512_dpbf16_ps(out[g][n], values[n], weight);
        }
    }
    for (int g = 0; g < G; ++g)
        for (int n = 0; n < 2 * N; ++n) running[g].out[i / kLanes + n] = (Floats)out[g][n];
}

template <int G>
void add_all_half_values(const Run<bf16>& run, const Shape& shape, const float (*weights)[kLanes], const float* rescale,
                         bool fetches, Ahead& ahead, Running* running) {
    constexpr int64_t together = 4 * kLanes;
    int64_t i = 0;
    for (; i + together <= shape.dim; i += together, fetches = false)
        (fetches ? add_half_values<G, 2, true> : add_half_values<G, 2, false>)(run, shape.stride, i, weights, rescale,
                                                                              ahead, running);
    if (i < shape.dim)
        (fetches ? add_half_values<G, 1, true> : add_half_values<G, 1, false>)(run, shape.stride, i, weights, rescale,
                                                                              ahead, running);
}

// A head's sums, back in the order of the elements.
inline void in_order(Floats* out, int chunks) {
    const __m512i low = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int c = 0; c < chunks; c += 2) {
        const __m512 lower = (__m512)out[c], upper = (__m512)out[c + 1];
        out[c] = (Floats)_mm512_permutex2var_ps(lower, low, upper);
        out[c + 1] = (Floats)_mm512_permutex2var_ps(lower, high, upper);
    }
}

#endif

// A part of a sequence, as far as some KV heads go.
struct Task {
    int64_t sequence, begin, end, head, kv_count;
    int64_t place;  // of what comes of it among the parts; negative where it is the whole
};

template <class T, class C>
class Attention {
  public:
    const T* q;
    const C *k_cache, *v_cache;
    const int64_t* rows;
    const int32_t *tables, *lengths;
    T* out;
    int64_t sequences, width, q_stride;
    const int64_t* strides;
    int64_t window;
    float v_scale;
    int threads;
    Shape shape;
    int kind;

    void run() const {
        thread_local std::vector<Task> tasks;
        thread_local std::vector<int64_t> firsts;  // of each sequence's parts
        thread_local std::vector<float> parts;
        const int64_t line = shape.chunks * kLanes + 2, heads = shape.kv_heads * shape.group;
        const int64_t places = lay_out(tasks, firsts);
        parts.resize(places * heads * line);
        const Task* const todo = tasks.data();
        const int64_t* const first = firsts.data();
        float* const kept = parts.data();
        const int64_t count = tasks.size();
#pragma omp parallel num_threads(threads) if (threads > 1 && count > 1)
        {
            if (kind == 2) begin_tiles();
#pragma omp for schedule(dynamic)
            for (int64_t at = 0; at < count; ++at) attend(todo[at], kept);
            if (kind == 2) end_tiles();
            if (places > 0)
#pragma omp for schedule(static)
                for (int64_t sequence = 0; sequence < sequences; ++sequence) put_together(sequence, first[sequence], kept);
        }
    }

  private:
    int64_t first_of(int64_t sequence) const {
        const int64_t length = lengths[sequence];
        return window > 0 && length > window ? length - window : 0;
    }

    int64_t parts_of(int64_t sequence) const {
        return (lengths[sequence] + kPart - 1) / kPart - first_of(sequence) / kPart;
    }

    // Every part of every sequence; how many of these are not a whole one.
    int64_t lay_out(std::vector<Task>& tasks, std::vector<int64_t>& firsts) const {
        tasks.clear();
        firsts.clear();
        int64_t places = 0;
        const int64_t together = shape.group > kMost ? 1 : least(shape.kv_heads, kMost / shape.group);
        for (int64_t sequence = 0; sequence < sequences; ++sequence) {
            const int64_t first = first_of(sequence), length = lengths[sequence], parts = parts_of(sequence);
            firsts.push_back(places);
            for (int64_t part = first / kPart; part * kPart < length; ++part) {
                const int64_t place = parts > 1 ? places++ : -1;
                const int64_t begin = part * kPart < first ? first : part * kPart, end = least(length, (part + 1) * kPart);
                for (int64_t head = 0; head < shape.kv_heads; head += together)
                    tasks.push_back({sequence, begin, end, head, least(together, shape.kv_heads - head), place});
            }
        }
        return places;
    }

    void begin_tiles() const {
#ifdef KVF_AMX
        const TileConfig config;
        asm volatile("" ::: "memory");
        _tile_loadconfig(&config);
#endif
    }

    void end_tiles() const {
#ifdef KVF_AMX
        _tile_release();
#endif
    }

    // Heads `first` to `first + heads` of each KV head of a task.
    void take_in(const T* query, int64_t kv_count, int64_t first, int heads, Queries& queries) const {
        for (int64_t kv = 0; kv < kv_count; ++kv)
            for (int g = 0; g < heads; ++g) {
                const T* from = query + (kv * shape.group + first + g) * shape.dim;
                const int64_t at = kv * heads + g;
                for (int c = 0; c < shape.chunks; ++c)
                    queries.wide[at * shape.chunks + c] =
                        load(from + c * kLanes, static_cast<int>(shape.dim) - c * kLanes);
                if (queries.kind == 1) memcpy(static_cast<void*>(queries.halves[at]), from, shape.dim * sizeof(T));
                if (queries.kind != 2) continue;
                for (int64_t pair = 0; pair < shape.dim / 2; ++pair)
                    memcpy(&queries.packed[kv * heads + g / kMostHeads * kMostHeads][pair / 16][pair % 16][g % kMostHeads],
                           reinterpret_cast<const char*>(from) + 4 * pair, 4);
            }
    }

    void attend(const Task& task, float* kept) const {
        const T* query = q + rows[task.sequence] * q_stride + task.head * shape.group * shape.dim;
        for (int64_t first = 0; first < shape.group; first += kMost) {
            const int heads = static_cast<int>(least(shape.group - first, kMost));
            Queries queries;
            queries.kind = kind;
            take_in(query, task.kv_count, first, heads, queries);
            asm volatile("" ::: "memory");
            Running running[kMost];
            walk(task, heads, queries, running);
#ifdef KVF_DOT
            if (kind == 1)
                for (int64_t at = 0; at < task.kv_count * heads; ++at) in_order(running[at].out, shape.chunks);
#endif
            for (int64_t kv = 0; kv < task.kv_count; ++kv)
                for (int g = 0; g < heads; ++g) {
                    const int64_t head = (task.head + kv) * shape.group + first + g;
                    const Running& one = running[kv * heads + g];
                    if (task.place < 0)
                        finish(task.sequence, head, one.out, sum_of(one.sums));
                    else
                        keep(one, kept, task.place, head);
                }
        }
    }

    // Along the tokens of a task.
    void walk(const Task& task, int heads, const Queries& queries, Running* running) const {
        const int32_t* table = tables + task.sequence * width;
        const auto place = [&](int64_t token, int64_t kv) {
            return table[token / shape.block_size] * strides[0] + token % shape.block_size * strides[1] +
                   (task.head + kv) * strides[2];
        };
        const auto reach = [&](int64_t token) {  // tokens that lie in a row from `token` on, at most sixteen
            return static_cast<int>(
                least(kLanes, least(task.end - token, shape.block_size - token % shape.block_size)));
        };
        for (int64_t token = task.begin; token < task.end;) {
            const int tokens = reach(token);
            const int64_t next = token + tokens;
            Ahead ahead = ahead_of(task, next < task.end ? reach(next) : 0, place(next < task.end ? next : token, 0));
            alignas(64) float scores[kMost][kLanes];
            Run<C> runs[kMost];
            float rescale[kMost];
            for (int64_t kv = 0; kv < task.kv_count; ++kv) {
                const int64_t here = place(token, kv);
                runs[kv] = {k_cache + here, v_cache + here, tokens};
                ahead.steps(kScoring);
                for (int g = 0; g < heads; g += kMostHeads)
                    score(queries, static_cast<int>(kv) * heads + g, static_cast<int>(least(kMostHeads, heads - g)),
                          runs[kv], shape, scores);
            }
            for (int64_t at = 0; at < task.kv_count * heads; ++at) {
                ahead.steps(kWeighing);
                rescale[at] = weigh(scores[at], tokens, shape, running[at]);
            }
            for (int64_t kv = 0; kv < task.kv_count; ++kv)
                for (int g = 0; g < heads; g += kMostHeads) {
                    const int64_t at = kv * heads + g;
                    by_heads(static_cast<int>(least(kMostHeads, heads - g)), [&](auto count) {
#ifdef KVF_DOT
                        if constexpr (std::is_same_v<C, bf16>)
                            if (kind == 1)
                                return add_all_half_values<count()>(runs[kv], shape, scores + at, rescale + at, g == 0,
                                                                    ahead, running + at);
#endif
                        add_all_values<C, count()>(runs[kv], shape, scores + at, rescale + at, g == 0, ahead, running + at);
                    });
                }
            ahead.steps(kMost * kLanes);
            token = next;
        }
    }

    // `tokens` of a task from the place of the first one on, by token or by head, as they lie.
    Ahead ahead_of(const Task& task, int64_t tokens, int64_t place) const {
        const int64_t width = static_cast<int64_t>(sizeof(C)), piece = shape.dim * width;
        const bool by_token = strides[1] > strides[2];
        const int64_t rows = by_token ? tokens : tokens > 0 ? task.kv_count : 0;
        return {reinterpret_cast<const char*>(k_cache + place), reinterpret_cast<const char*>(v_cache + place), rows,
                (by_token ? strides[1] : strides[2]) * width, (by_token ? task.kv_count : tokens) * piece, 0, piece};
    }

    void keep(const Running& one, float* kept, int64_t part, int64_t head) const {
        float* to = kept + (part * shape.kv_heads * shape.group + head) * (shape.chunks * kLanes + 2);
        to[0] = one.highest;
        to[1] = sum_of(one.sums);
        for (int c = 0; c < shape.chunks; ++c) store(to + 2 + c * kLanes, one.out[c]);
    }

    void put_together(int64_t sequence, int64_t first, const float* kept) const {
        const int64_t parts = parts_of(sequence), heads = shape.kv_heads * shape.group;
        if (parts == 1) return;
        const int64_t line = shape.chunks * kLanes + 2;
        for (int64_t head = 0; head < heads; ++head) {
            const float* from = kept + (first * heads + head) * line;
            float highest = from[0], sum = 0.0f;
            for (int64_t part = 1; part < parts; ++part)
                highest = from[part * heads * line] > highest ? from[part * heads * line] : highest;
            Floats out[kMostChunks] = {};
            for (int64_t part = 0; part < parts; ++part) {
                const float* one = from + part * heads * line;
                const float share = std::exp(one[0] - highest);
                sum += one[1] * share;
                for (int c = 0; c < shape.chunks; ++c) out[c] += load(one + 2 + c * kLanes) * share;
            }
            finish(sequence, head, out, sum);
        }
    }

    void finish(int64_t sequence, int64_t head, const Floats* values, float sum) const {
        T* to = out + (rows[sequence] * shape.kv_heads * shape.group + head) * shape.dim;
        for (int c = 0; c < shape.chunks; ++c)
            store(to + c * kLanes, values[c] / sum * v_scale, static_cast<int>(shape.dim) - c * kLanes);
    }
};

}  // namespace

// out [T, kv_heads * group, dim] at `rows`, of q [T, ...] with `q_stride` elements from token to token.
// tables: [sequences, width]. strides: as kvf_rope_store's. dim <= 256. window: tokens that are seen, 0 for all. softcap:
// of the scores, 0 for none. kind: as kvf_linear_kind says. half, eighth: see by_types. scale: with K's own; v_scale: V's
// own.
extern "C" void kvf_paged_decode(int kind, int half, int eighth, const void* q, const void* k_cache, const void* v_cache,
                                 const int64_t* rows, const int32_t* tables, const int32_t* lengths, void* out,
                                 int64_t sequences, int64_t width, int64_t q_stride, int64_t kv_heads, int64_t group,
                                 int64_t dim, int64_t block_size, const int64_t* strides, float scale,
                                 int64_t window, float softcap, float v_scale, int threads) {
    perform([=] {
        by_types(half, eighth, [&](auto* number, auto* element) {
            using T = std::remove_pointer_t<decltype(number)>;
            using C = std::remove_pointer_t<decltype(element)>;
            constexpr bool in_halves = std::is_same_v<T, bf16> && std::is_same_v<C, bf16>;
            const Shape shape{kv_heads, group, dim, block_size, strides[1],
                              static_cast<int>((dim + kLanes - 1) / kLanes), scale, softcap};
            const Attention<T, C> attention{static_cast<const T*>(q), static_cast<const C*>(k_cache),
                                            static_cast<const C*>(v_cache), rows, tables, lengths, static_cast<T*>(out),
                                            sequences, width, q_stride, strides, window, v_scale, threads, shape,
                                            in_halves && dim % 32 == 0 ? kind : 0};
            attention.run();
        });
    });
}
