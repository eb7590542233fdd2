// A tape is made, recorded by one thread, run as often as wanted, and freed.

#include "tape.h"

#include <cstdint>

thread_local Tape* recording = nullptr;

extern "C" Tape* kvf_tape_new() { return new Tape; }

extern "C" void kvf_tape_free(Tape* tape) { delete tape; }

// From now on this thread's calls are kept on `tape`; by null, no more.
extern "C" void kvf_tape_record(Tape* tape) { recording = tape; }

extern "C" int64_t kvf_tape_length(const Tape* tape) { return static_cast<int64_t>(tape->calls.size()); }

// Make the calls from `first` to before `last` again.
extern "C" void kvf_tape_run(const Tape* tape, int64_t first, int64_t last) {
    for (int64_t at = first; at < last; ++at) tape->calls[at]();
}
