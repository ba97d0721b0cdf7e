// Threads that share the work of a pass, and the memory that a pass works in.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

// All threads of a team meet here. They spin for a moment and then let others run, so that a busy machine is not made worse.
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

// work(context, 0 ... threads - 1), the caller being thread 0. Where another caller has the team, or this process has none, the caller works
// alone: sums do not depend on who takes them.
void together(int threads, Work work, void *context);

// The caller's own memory of at least so many bytes, on a cache line; the next call may move it.
void *workspace(size_t bytes);
