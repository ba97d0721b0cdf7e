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

constexpr auto SPIN = std::chrono::microseconds(50);
constexpr int MOST = 256;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Whether `done` became true within SPIN.
template <class Done> bool spun(Done done) {
    const auto until = std::chrono::steady_clock::now() + SPIN;
    do {
        for (int i = 0; i < 64; ++i) {
            if (done()) return true;
            pause();
        }
    } while (std::chrono::steady_clock::now() < until);
    return done();
}

// Sleeping threads that wait for the next job. It is never destroyed: they may outlive what runs at the end of a process.
class Team {
  public:
    const pid_t process = getpid();
    std::mutex taken;

    void run(int threads, Work work, void *context) {
        threads = grow(threads);
        Barrier barrier(threads);
        left_.store(started_);
        work_ = work, context_ = context, threads_ = threads, barrier_ = &barrier;
        job_.fetch_add(1);
        job_.notify_all();
        work(context, 0, threads, barrier);
        if (!spun([&] { return left_.load() == 0; }))
            while (left_.load()) sched_yield();
    }

  private:
    int started_ = 0;
    Work work_ = nullptr;
    void *context_ = nullptr;
    int threads_ = 0;
    Barrier *barrier_ = nullptr;
    alignas(64) std::atomic<uint32_t> job_{0};
    alignas(64) std::atomic<int> left_{0};

    // So many as there are, where the system gives no more.
    int grow(int threads) {
        try {
            for (; started_ < threads - 1; ++started_) std::thread(&Team::serve, this, started_ + 1, job_.load()).detach();
        } catch (const std::system_error &) {
            return started_ + 1;
        }
        return threads;
    }

    void serve(int thread, uint32_t seen) {
        for (;;) {
            if (!spun([&] { return job_.load() != seen; })) job_.wait(seen);
            if (job_.load() == seen) continue;
            ++seen;
            if (thread < threads_) work_(context_, thread, threads_, *barrier_);
            left_.fetch_sub(1);
        }
    }
};

// A child that was forked has none of the threads, and perhaps a lock that nobody will open again.
Team *team() {
    static std::atomic<Team *> ours{nullptr};
    Team *found = ours.load();
    while (found == nullptr || found->process != getpid()) {
        Team *made = new Team;
        if (ours.compare_exchange_strong(found, made)) return made;
        delete made;
    }
    return found;
}

struct Own {
    void *memory = nullptr;
    size_t bytes = 0;
    ~Own() { std::free(memory); }
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
    if (!spun([&] { return phase_.load() != phase; }))
        while (phase_.load() == phase) sched_yield();
}

void together(int threads, Work work, void *context) {
    if (threads > MOST) threads = MOST;
    if (threads > 1) {
        Team *found = team();
        std::unique_lock<std::mutex> mine(found->taken, std::try_to_lock);
        if (mine.owns_lock()) return found->run(threads, work, context);
    }
    Barrier alone(1);
    work(context, 0, 1, alone);
}

void *workspace(size_t bytes) {
    thread_local Own own;
    if (own.bytes < bytes) {
        std::free(own.memory);
        own.bytes = (bytes + 4095) / 4096 * 4096;
        own.memory = std::aligned_alloc(4096, own.bytes);
        if (own.memory == nullptr) {
            own.bytes = 0;
            throw std::bad_alloc();
        }
    }
    return own.memory;
}
