// Threads of the pool that have helped with one call and wait, awake, for the next: see `Share`.
//
// A step makes hundreds of calls, some tens of microseconds apart. To wake a thread that sleeps meanwhile takes the caller
// several microseconds, and some thirty more pass until it runs.

#ifndef PALLAS_KERNELS_NATIVE_HELPERS_H_
#define PALLAS_KERNELS_NATIVE_HELPERS_H_

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <thread>
#include <utility>

namespace native {

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

using Task = std::function<void()>;
class Helper;

// Where threads wait, one in a place. All libraries of the kernels have the same: see `call.h`.
using Places = std::array<std::atomic<Helper*>, 64>;
inline Places own_places{};
inline Places* places = &own_places;

// A thread that helps. Who takes it out of its place owes it a task.
class Helper {
 public:
  // Does a task, and those that it is given soon after one that was short.
  void Help(Task task) {
    for (;;) {
      const auto start = Clock::now();
      task();
      if (Clock::now() - start > kShort) return;
      std::atomic<Helper*>* place = Enter();
      if (!place || !Await(*place)) return;
      task = std::move(task_);
      has_task_.store(false, std::memory_order_relaxed);
    }
  }

  void Give(Task task) {
    task_ = std::move(task);
    has_task_.store(true, std::memory_order_release);
  }

 private:
  using Clock = std::chrono::steady_clock;
  // XLA works about so long between two calls of a step that decodes. Between the long ones of a prompt it works longer,
  // itself with several threads, which want this one's core.
  static constexpr std::chrono::microseconds kPatience{50}, kShort{700};

  // The place that it waits in; null if there is none.
  std::atomic<Helper*>* Enter() {
    for (auto& place : *places) {
      Helper* nobody = nullptr;
      if (place.compare_exchange_strong(nobody, this, std::memory_order_release, std::memory_order_relaxed)) return &place;
    }
    return nullptr;
  }

  // Whether it was given a task in time; if not, it has left its place.
  bool Await(std::atomic<Helper*>& place) {
    for (const auto end = Clock::now() + kPatience;;) {
      for (int i = 0; i < 16; ++i) {
        if (has_task_.load(std::memory_order_acquire)) return true;
        Pause();
      }
      std::this_thread::yield();
      Helper* self = this;
      const bool is_late = Clock::now() > end;
      if (is_late && place.compare_exchange_strong(self, nullptr, std::memory_order_relaxed)) return false;
    }
  }

  Task task_;
  std::atomic<bool> has_task_{false};
};

// Gives a task to a thread that waits; false if none does.
inline bool GiveToHelper(const Task& task) {
  for (auto& place : *places) {
    if (place.load(std::memory_order_relaxed) == nullptr) continue;
    if (Helper* helper = place.exchange(nullptr, std::memory_order_acquire)) {
      helper->Give(task);
      return true;
    }
  }
  return false;
}

}  // namespace native

#endif  // PALLAS_KERNELS_NATIVE_HELPERS_H_
