/* Copies the runs of a batch: plainly, or with stores that go past the caches, four places at a time.
 *
 * A plain copy of a batch reads every line of the target from memory before it overwrites it, and a third of the
 * traffic is for nothing; the C library knows better only for a single copy of many megabytes. And one stream of
 * addresses keeps one page of memory open at a time where the hardware would serve several.
 *
 * The middle of every run, from a 64-byte line of the target on, is laid end to end, cut into LANES shares, and the
 * shares are copied in step; what is left at the ends is copied plainly. The caller has checked every run.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LANES 4
#define LINE 64
#define STRIDE 4096  /* bytes of a lane before its place is looked up again */
#define AHEAD 512    /* bytes: how far ahead of its loads a lane asks for its source */
#define EXPORT __attribute__((visibility("default")))

struct run { int64_t source, target, nbytes; };

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

typedef void step_fn(char *const *to, const char *const *from, int lanes, size_t nbytes);

__attribute__((target("avx512f"))) static void step_avx512(char *const *to, const char *const *from, int lanes, size_t nbytes)
{
	for (size_t at = 0; at < nbytes; at += LINE)
		for (int lane = 0; lane < lanes; lane++) {
			_mm_prefetch(from[lane] + at + AHEAD, _MM_HINT_T0);
			_mm512_stream_si512((void *)(to[lane] + at), _mm512_loadu_si512(from[lane] + at));
		}
}

__attribute__((target("avx2"))) static void step_avx2(char *const *to, const char *const *from, int lanes, size_t nbytes)
{
	for (size_t at = 0; at < nbytes; at += LINE)
		for (int lane = 0; lane < lanes; lane++) {
			_mm_prefetch(from[lane] + at + AHEAD, _MM_HINT_T0);
			for (int half = 0; half < LINE; half += 32)
				_mm256_stream_si256((void *)(to[lane] + at + half),
				                    _mm256_loadu_si256((const void *)(from[lane] + at + half)));
		}
}

/* Where a lane is: in a run, so many bytes into its middle, with so many of its share to go. */
struct lane { const struct run *run; size_t done, left; };

static size_t lead_of(const char *target, const struct run *run)
{
	size_t lead = -(uintptr_t)(target + run->target) % LINE;
	return lead < (size_t)run->nbytes ? lead : (size_t)run->nbytes;
}

static size_t middle_of(const char *target, const struct run *run)
{
	return ((size_t)run->nbytes - lead_of(target, run)) / LINE * LINE;
}

static void settle(struct lane *lane, const char *target)
{
	while (lane->left && lane->done == middle_of(target, lane->run)) {
		lane->run++;
		lane->done = 0;
	}
}

static void stream(char *target, const char *source, const struct run *runs, size_t count, size_t total, step_fn *step)
{
	struct lane lanes[LANES];
	size_t share = total / LANES / LINE * LINE, passed = 0;
	const struct run *run = runs;
	for (int i = 0; i < LANES; i++) {
		size_t start = i * share;
		for (size_t middle; run < runs + count && passed + (middle = middle_of(target, run)) <= start; run++)
			passed += middle;
		lanes[i] = (struct lane){run, start - passed, i < LANES - 1 ? share : total - start};
	}
	for (;;) {
		char *to[LANES];
		const char *from[LANES];
		struct lane *moved[LANES];
		size_t nbytes = STRIDE;
		int active = 0;
		for (int i = 0; i < LANES; i++) {
			struct lane *lane = &lanes[i];
			settle(lane, target);
			if (!lane->left)
				continue;
			size_t lead = lead_of(target, lane->run), room = middle_of(target, lane->run) - lane->done;
			room = room < lane->left ? room : lane->left;
			nbytes = nbytes < room ? nbytes : room;
			to[active] = target + lane->run->target + lead + lane->done;
			from[active] = source + lane->run->source + lead + lane->done;
			moved[active++] = lane;
		}
		if (!active)
			return;
		step(to, from, active, nbytes);
		for (int i = 0; i < active; i++) {
			moved[i]->done += nbytes;
			moved[i]->left -= nbytes;
		}
	}
}

static step_fn *best_step(void)
{
	__builtin_cpu_init();
	if (__builtin_cpu_supports("avx512f"))
		return step_avx512;
	return __builtin_cpu_supports("avx2") ? step_avx2 : NULL;
}

static size_t stream_middles(char *target, const char *source, const struct run *runs, size_t count)
{
	step_fn *step = best_step();
	size_t total = 0;
	if (step) {
		for (const struct run *run = runs; run < runs + count; run++)
			total += middle_of(target, run);
		if (total)
			stream(target, source, runs, count, total, step);
		/* What was streamed is seen by others only after this. */
		_mm_sfence();
	}
	return total;
}

#else

static size_t lead_of(const char *target, const struct run *run) { return 0; }
static size_t middle_of(const char *target, const struct run *run) { return 0; }
static size_t stream_middles(char *target, const char *source, const struct run *runs, size_t count) { return 0; }

#endif

EXPORT void kvf_copy_runs(char *target, const char *source, const struct run *runs, size_t count, int past_caches)
{
	int streamed = past_caches && stream_middles(target, source, runs, count);
	for (const struct run *run = runs; run < runs + count; run++) {
		size_t lead = streamed ? lead_of(target, run) : 0, done = streamed ? lead + middle_of(target, run) : 0;
		memcpy(target + run->target, source + run->source, lead);
		memcpy(target + run->target + done, source + run->source + done, run->nbytes - done);
	}
}
