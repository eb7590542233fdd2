// Calls of the kernels, kept as they are made, so that they can be made again by one call.

#pragma once

#include <functional>
#include <vector>

struct Tape {
    std::vector<std::function<void()>> calls;
};

extern thread_local Tape* recording;  // of this thread's calls; null where nothing is kept

// Make a call, and keep it where the thread records. What it is about must be in the call by value: numbers and addresses.
template <class Call>
inline void perform(Call call) {
    if (recording) recording->calls.emplace_back(call);
    call();
}
