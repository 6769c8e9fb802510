// Shares the host family's work among the threads of a pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "cutlass_kernels/launch/kernel.h"

namespace jax_streamk {

// Shares work items between the calling thread and a pool, which has Schedule(function) and num_threads(). The caller
// takes items too, and waits only for items that another thread has started, so there is progress even if all threads
// of the pool are in calls like this one.
template <typename Pool>
class PoolExecutor final : public Executor {
 public:
  explicit PoolExecutor(Pool& pool) : pool_(pool) {}

  void parallel(int32_t count, void (*work)(void*, int32_t), void* context) override {
    int64_t const helpers = std::min<int64_t>(count - 1, pool_.num_threads());
    if (helpers <= 0) {
      for (int32_t i = 0; i < count; ++i) work(context, i);
      return;
    }
    auto shared = std::make_shared<Shared>();
    shared->count = count;
    shared->work = work;
    shared->context = context;
    for (int64_t i = 0; i < helpers; ++i) pool_.Schedule([shared] { shared->drain(); });
    shared->drain();
    std::unique_lock lock(shared->mutex);
    shared->all_done.wait(lock, [&] { return shared->done == count; });
  }

 private:
  struct Shared {
    int32_t count;
    void (*work)(void*, int32_t);
    void* context;  // the caller's: not touched once every item is done
    std::atomic<int32_t> next{0};
    std::mutex mutex;
    std::condition_variable all_done;
    int32_t done = 0;

    void drain() {
      int32_t finished = 0;
      for (int32_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count; ++finished) work(context, i);
      if (finished == 0) return;
      std::lock_guard lock(mutex);
      done += finished;
      if (done == count) all_done.notify_one();
    }
  };

  Pool& pool_;
};

}  // namespace jax_streamk
