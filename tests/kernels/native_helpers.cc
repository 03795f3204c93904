// Tests `Share` with calls of all lengths, from several threads at once, with and without pauses between them. It exits
// with 0 if each item was done once, if helpers waited and were given tasks, and if none waits at the end.

#include <condition_variable>
#include <cstdio>
#include <deque>
#include <mutex>

#include "work.h"

namespace {

using namespace native;

class Pool {
 public:
  explicit Pool(int64_t num_threads) {
    for (int64_t i = 0; i < num_threads; ++i) threads_.emplace_back([this] { Run(); });
  }
  ~Pool() {
    Schedule(nullptr);
    for (auto& thread : threads_) thread.join();
  }
  int64_t num_threads() const { return threads_.size(); }
  void Schedule(Task task) {
    const std::lock_guard lock(mutex_);
    num_scheduled += task != nullptr;
    tasks_.push_back(std::move(task));
    has_tasks_.notify_one();
  }
  std::atomic<int64_t> num_scheduled{0};

 private:
  void Run() {
    for (;;) {
      std::unique_lock lock(mutex_);
      has_tasks_.wait(lock, [this] { return !tasks_.empty(); });
      const Task task = tasks_.front();
      if (!task) return has_tasks_.notify_one();  // the end, for the others, too
      tasks_.pop_front();
      lock.unlock();
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable has_tasks_;
  std::deque<Task> tasks_;
  std::vector<std::thread> threads_;
};

constexpr int64_t kMostItems = 9;

// Whether each item of many calls was done once; `asked` grows by the threads that could have helped.
bool Call(Pool& pool, uint32_t seed, std::atomic<int64_t>& asked) {
  for (uint32_t call = 0, random = seed; call < 4000; ++call) {
    random = random * 1664525 + 1013904223;
    const int64_t num_items = 1 + (random >> 16) % kMostItems;
    const int64_t work = (random >> 8) % 64;
    auto done = std::make_shared<std::array<std::atomic<int>, kMostItems>>();
    Share(pool, num_items, [=](int64_t item, int64_t) {
      for (int64_t i = 0; i < work; ++i) Pause();
      ++(*done)[item];
    });
    for (int64_t item = 0; item < kMostItems; ++item) {
      if ((*done)[item] != (item < num_items)) return false;
    }
    asked += std::min(pool.num_threads(), num_items) - 1;
    if (random >> 24 < 4) std::this_thread::sleep_for(std::chrono::microseconds(random >> 20 & 255));
  }
  return true;
}

}  // namespace

int main() {
  std::atomic<int64_t> asked{0}, scheduled{0};
  std::atomic<bool> is_right{true};
  {
    Pool one(3), other(2);
    std::vector<std::thread> callers;
    for (uint32_t i = 0; i < 3; ++i) {
      callers.emplace_back([&, i] {
        if (!Call(i % 2 ? other : one, i, asked)) is_right = false;
      });
    }
    for (auto& caller : callers) caller.join();
    scheduled = one.num_scheduled + other.num_scheduled;
  }
  bool is_empty = true;
  for (auto& place : *places) is_empty = is_empty && place.load() == nullptr;
  printf("asked %lld, scheduled %lld\n", static_cast<long long>(asked), static_cast<long long>(scheduled));
  return !is_right ? 1 : scheduled == asked ? 2 : !is_empty ? 3 : 0;
}
