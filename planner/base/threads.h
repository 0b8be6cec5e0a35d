#pragma once

#include <cstddef>
#include <functional>

namespace tessera {

// `threads`, or with 0 as many as the machine runs at once.
int ThreadCount(int threads);

// Calls `work` on so many threads, this one among them, and waits for all.
void OnThreads(int threads, const std::function<void()>& work);

// Calls `work(i)` for each i < count, each once, on so many threads.
void ForEach(int threads, size_t count,
             const std::function<void(size_t)>& work);

}  // namespace tessera
