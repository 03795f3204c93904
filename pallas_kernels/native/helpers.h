// Helpers: threads of the pool that have worked on one call, and busy-wait for the next. See `Share`.
//
// A step makes hundreds of calls, some tens of microseconds apart. Waking a sleeping thread costs the caller several
// microseconds, and some thirty more pass until the thread runs.

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

// The waiting helpers, one in each slot of an array that all libraries of the kernels share: see `call.h`.
using Places = std::array<std::atomic<Helper*>, 64>;
inline Places own_places{};
inline Places* places = &own_places;

// A thread that helps. A caller that takes it out of its slot must give it a task.
class Helper {
 public:
  // Runs a task. After a short one, waits a while for the next and runs it, too.
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
  // kPatience: about as long as XLA works between two calls of a decode step. Between the long calls of a prompt (over
  // kShort) XLA works longer, with several threads, which need this one's core.
  static constexpr std::chrono::microseconds kPatience{50}, kShort{700};

  // Takes a free slot and returns it; null if there is none.
  std::atomic<Helper*>* Enter() {
    for (auto& place : *places) {
      Helper* nobody = nullptr;
      if (place.compare_exchange_strong(nobody, this, std::memory_order_release, std::memory_order_relaxed)) return &place;
    }
    return nullptr;
  }

  // Returns whether a task came in time. If not, the helper has left its slot.
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

// Gives a task to a waiting helper. Returns false if none waits.
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
