// The threads that share the work of a pass, and the memory that a pass works in.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

// A barrier for all threads of a job. A waiting thread spins for a moment and then yields, so that
// it does not slow down a machine that has other work.
class Barrier {
  public:
    explicit Barrier(int count) : count_(count) {}
    void wait();

  private:
    const int count_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
};

using Work = void (*)(void *context, int thread, int threads, Barrier &barrier);

// Calls work(context, thread, threads, barrier) on `threads` threads; the caller is thread 0.
// The caller works alone if another caller is using the pool. The result is the same, because no
// sum depends on the number of threads.
void run_on_threads(int threads, Work work, void *context);

// Returns page-aligned memory of at least `bytes` bytes that belongs to the calling thread. The
// next call may move it. Throws std::bad_alloc.
void *get_workspace(size_t bytes);
