#include "runtime/thread_pool.h"

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "planner/base/check.h"
#include "planner/base/start_thread.h"

namespace tessera {

struct ThreadPool::Shared {
  std::mutex caller;  // held by whom the workers work for
  std::mutex mutex;
  std::condition_variable begun;
  std::condition_variable ended;
  // Of the current loop.
  const std::function<void(int64_t)>* body = nullptr;
  int64_t iterations = 0;
  int64_t next = 0;
  int64_t unfinished = 0;
  bool stop = false;
  std::vector<std::thread> workers;

  // Runs iterations until none is left. REQUIRES: `lock` holds the mutex.
  void Work(std::unique_lock<std::mutex>& lock) {
    while (next < iterations) {
      const int64_t i = next++;
      lock.unlock();
      (*body)(i);
      lock.lock();
      if (--unfinished == 0) ended.notify_one();
    }
  }
};

ThreadPool::ThreadPool(int threads) : threads_(threads) {
  TESSERA_CHECK(threads >= 1) << threads;
  if (threads == 1) return;
  shared_ = std::make_unique<Shared>();
  for (int i = 1; i < threads; ++i) {
    auto worker = StartThread([shared = shared_.get()] {
      std::unique_lock lock(shared->mutex);
      while (!shared->stop) {
        shared->Work(lock);
        shared->begun.wait(lock);
      }
    });
    if (!worker) break;  // fewer do the same work
    shared_->workers.push_back(*std::move(worker));
  }
}

ThreadPool::~ThreadPool() {
  if (shared_ == nullptr) return;
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->stop = true;
  }
  shared_->begun.notify_all();
  for (std::thread& worker : shared_->workers) worker.join();
}

void ThreadPool::For(int64_t n, const std::function<void(int64_t)>& f) {
  std::unique_lock<std::mutex> caller;
  if (shared_ != nullptr && n > 1) {
    caller = std::unique_lock(shared_->caller, std::try_to_lock);
  }
  if (!caller.owns_lock()) {
    for (int64_t i = 0; i < n; ++i) f(i);
    return;
  }
  std::unique_lock lock(shared_->mutex);
  shared_->body = &f;
  shared_->iterations = n;
  shared_->next = 0;
  shared_->unfinished = n;
  shared_->begun.notify_all();
  shared_->Work(lock);
  shared_->ended.wait(lock, [&] { return shared_->unfinished == 0; });
}

}  // namespace tessera
