#include "threads.h"

#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

namespace {

constexpr auto SPIN_TIME = std::chrono::microseconds(50);
constexpr int MAX_THREADS = 256;

inline void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Spins until `done()` is true, at most for SPIN_TIME. Returns whether it became true.
template <class Done> bool spin_until(Done done) {
    const auto deadline = std::chrono::steady_clock::now() + SPIN_TIME;
    do {
        for (int i = 0; i < 64; ++i) {
            if (done()) return true;
            pause_cpu();
        }
    } while (std::chrono::steady_clock::now() < deadline);
    return done();
}

// Threads that sleep until the next job. A pool is never destroyed, because its threads may run
// longer than the destructors at the end of a process.
class ThreadPool {
  public:
    const pid_t process = getpid();
    std::mutex in_use;

    void run(int threads, Work work, void *context) {
        threads = start_threads(threads);
        Barrier barrier(threads);
        busy_.store(started_);
        work_ = work, context_ = context, threads_ = threads, barrier_ = &barrier;
        job_.fetch_add(1);
        job_.notify_all();
        work(context, 0, threads, barrier);
        if (!spin_until([&] { return busy_.load() == 0; }))
            while (busy_.load()) sched_yield();
    }

  private:
    int started_ = 0;
    Work work_ = nullptr;
    void *context_ = nullptr;
    int threads_ = 0;
    Barrier *barrier_ = nullptr;
    alignas(64) std::atomic<uint32_t> job_{0};
    alignas(64) std::atomic<int> busy_{0};   // pool threads that have not finished the job

    // Starts missing threads. Returns how many threads can work, the caller included: fewer than
    // asked for if the system refuses to start one.
    int start_threads(int threads) {
        try {
            for (; started_ < threads - 1; ++started_)
                std::thread(&ThreadPool::run_worker, this, started_ + 1, job_.load()).detach();
        } catch (const std::system_error &) {
            return started_ + 1;
        }
        return threads;
    }

    void run_worker(int thread, uint32_t last_job) {
        for (;;) {
            if (!spin_until([&] { return job_.load() != last_job; })) job_.wait(last_job);
            if (job_.load() == last_job) continue;
            ++last_job;
            if (thread < threads_) work_(context_, thread, threads_, *barrier_);
            busy_.fetch_sub(1);
        }
    }
};

// Returns the pool of this process. A forked child needs a new one: it has none of its parent's
// threads, and the parent's lock may be locked for ever.
ThreadPool *get_thread_pool() {
    static std::atomic<ThreadPool *> current{nullptr};
    ThreadPool *pool = current.load();
    while (pool == nullptr || pool->process != getpid()) {
        ThreadPool *new_pool = new ThreadPool;
        if (current.compare_exchange_strong(pool, new_pool)) return new_pool;
        delete new_pool;
    }
    return pool;
}

struct ThreadBuffer {
    void *memory = nullptr;
    size_t bytes = 0;
    ~ThreadBuffer() { std::free(memory); }
};

}  // namespace

void Barrier::wait() {
    if (count_ == 1) return;
    const uint32_t phase = phase_.load();
    if (arrived_.fetch_add(1) == count_ - 1) {
        arrived_.store(0);
        phase_.store(phase + 1);
        return;
    }
    if (!spin_until([&] { return phase_.load() != phase; }))
        while (phase_.load() == phase) sched_yield();
}

void run_on_threads(int threads, Work work, void *context) {
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads > 1) {
        ThreadPool *pool = get_thread_pool();
        std::unique_lock<std::mutex> lock(pool->in_use, std::try_to_lock);
        if (lock.owns_lock()) return pool->run(threads, work, context);
    }
    Barrier barrier(1);
    work(context, 0, 1, barrier);
}

void *get_workspace(size_t bytes) {
    thread_local ThreadBuffer buffer;
    if (buffer.bytes < bytes) {
        std::free(buffer.memory);
        buffer.bytes = (bytes + 4095) / 4096 * 4096;
        buffer.memory = std::aligned_alloc(4096, buffer.bytes);
        if (buffer.memory == nullptr) {
            buffer.bytes = 0;
            throw std::bad_alloc();
        }
    }
    return buffer.memory;
}
