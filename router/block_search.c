/* Searching and filling the slots of block_slots.py, one key after the other; that file says what form they have.
 *
 * A table of tens of millions of keys lies in no cache, so what several keys need is asked for before the first is
 * looked at. All keys are over 0. The interpreter is held: a call takes microseconds.
 */
#include <stddef.h>
#include <stdint.h>

#define BUCKET 16
#define AHEAD 16 /* keys: how far ahead of its turn a bucket is asked for */
#define MIX 0x9E3779B97F4A7C15ull
#define EXPORT __attribute__((visibility("default")))

/* As Slots.described has it: addresses, and how many buckets there are. */
struct slots { uint64_t keys, values, passed, buckets; };

static uint64_t home(const struct slots *slots, uint64_t key)
{
	return (((key * MIX) >> 32) * slots->buckets) >> 32;
}

static void ask_for(const struct slots *slots, uint64_t key)
{
	uint64_t first = home(slots, key) * BUCKET;
	const uint64_t *keys = (const uint64_t *)(uintptr_t)slots->keys + first;

	__builtin_prefetch(keys);
	__builtin_prefetch(keys + BUCKET / 2);
	__builtin_prefetch((const uint32_t *)(uintptr_t)slots->values + first);
}

/* The slot of a key, -1 where there is none. */
static int64_t find(const struct slots *slots, uint64_t key)
{
	const uint64_t *keys = (const uint64_t *)(uintptr_t)slots->keys;
	const uint8_t *passed = (const uint8_t *)(uintptr_t)slots->passed;
	uint64_t bucket = home(slots, key);

	for (;;) {
		uint64_t first = bucket * BUCKET;
		for (int place = 0; place < BUCKET; place++)
			if (keys[first + place] == key)
				return (int64_t)(first + place);
		if (!passed[bucket])
			return -1;
		bucket = bucket + 1 == slots->buckets ? 0 : bucket + 1;
	}
}

static uint32_t value_of(const struct slots *slots, uint64_t key)
{
	int64_t slot = find(slots, key);

	return slot < 0 ? 0 : ((const uint32_t *)(uintptr_t)slots->values)[slot];
}

/* The slot of each key. */
EXPORT void kvf_locate(const struct slots *slots, const uint64_t *keys, size_t count, int64_t *found)
{
	for (size_t index = 0; index < count && index < AHEAD; index++)
		ask_for(slots, keys[index]);
	for (size_t index = 0; index < count; index++) {
		if (index + AHEAD < count)
			ask_for(slots, keys[index + AHEAD]);
		found[index] = find(slots, keys[index]);
	}
}

/* Values of the first keys, up to the first that has none, as pairs of a value and how many keys in a row have it.
 * Returns how many pairs there are. A key is in one of two tables, of which the second may be missing. */
EXPORT size_t kvf_lead(const struct slots *fresh, const struct slots *old, const uint64_t *keys, size_t count, uint32_t *pairs)
{
	size_t runs = 0;

	for (size_t index = 0; index < count; index++) {
		uint32_t value = value_of(fresh, keys[index]);
		if (!value && old)
			value = value_of(old, keys[index]);
		if (!value)
			return runs;
		/* Most prompts end at their first key: nothing is asked for before that is there. */
		for (size_t next = index ? index + AHEAD : 1; next <= index + AHEAD && next < count; next++)
			ask_for(fresh, keys[next]);
		if (runs && pairs[2 * runs - 2] == value) {
			pairs[2 * runs - 1]++;
		} else {
			pairs[2 * runs] = value;
			pairs[2 * runs + 1] = 1;
			runs++;
		}
	}
	return runs;
}

/* Put in keys that are not there, each once; there is room for all. Returns how many slots were never used before. */
EXPORT size_t kvf_insert(const struct slots *slots, const uint64_t *keys, const uint32_t *values, size_t count)
{
	uint64_t *into = (uint64_t *)(uintptr_t)slots->keys;
	uint32_t *numbers = (uint32_t *)(uintptr_t)slots->values;
	uint8_t *passed = (uint8_t *)(uintptr_t)slots->passed;
	size_t unused = 0;

	for (size_t index = 0; index < count; index++) {
		uint64_t bucket = home(slots, keys[index]), slot;
		int place;
		if (index + AHEAD < count)
			ask_for(slots, keys[index + AHEAD]);
		for (;;) {
			for (place = 0; place < BUCKET && numbers[bucket * BUCKET + place]; place++)
				;
			if (place < BUCKET)
				break;
			passed[bucket] = 1;
			bucket = bucket + 1 == slots->buckets ? 0 : bucket + 1;
		}
		slot = bucket * BUCKET + place;
		unused += into[slot] == 0;
		into[slot] = keys[index];
		numbers[slot] = values[index];
	}
	return unused;
}
