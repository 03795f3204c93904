// The division of work: among threads, and into blocks of rows.

#ifndef PALLAS_KERNELS_NATIVE_WORK_H_
#define PALLAS_KERNELS_NATIVE_WORK_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "helpers.h"

namespace native {

// Calls work(item, next item) for all items: on this thread, on helpers that wait, and on threads of the pool that
// start in time, which then wait to help with the next call. No thread waits for one that has not started, so calls
// that fill the pool cannot deadlock.
template <typename Pool, typename Work>
void Share(Pool& pool, int64_t num_items, Work work) {
  struct Progress {
    std::atomic<int64_t> taken{0}, done{0};
  };
  auto progress = std::make_shared<Progress>();  // shared: a thread may start after this call has returned
  const auto take_part = [=] {
    int64_t done = 0;
    for (int64_t item = progress->taken.fetch_add(1); item < num_items; ++done) {
      const int64_t next = progress->taken.fetch_add(1);
      work(item, std::min(next, num_items - 1));
      item = next;
    }
    progress->done.fetch_add(done, std::memory_order_release);
  };
  const int64_t num_helpers = std::min(pool.num_threads(), num_items) - 1;
  for (int64_t i = 0; i < num_helpers; ++i) {
    if (!GiveToHelper(take_part)) {
      pool.Schedule([take_part] { Helper().Help(take_part); });
    }
  }
  take_part();
  while (progress->done.load(std::memory_order_acquire) < num_items) Pause();
}

// Calls f(first, count) for blocks of at most `most` rows, of about equal size.
template <typename F>
void InBlocks(int64_t num_rows, int64_t most, F f) {
  if (num_rows <= most) return f(int64_t{0}, num_rows);
  const int64_t num_blocks = (num_rows + most - 1) / most;
  for (int64_t block = 0, first = 0; block < num_blocks; ++block) {
    const int64_t end = num_rows * (block + 1) / num_blocks;
    f(first, end - first);
    first = end;
  }
}

// Calls f with `count`, from 1 to kMost, as a compile-time constant.
template <int kMost, typename F>
void WithConstant(int64_t count, F f) {
  if constexpr (kMost > 1) {
    if (count < kMost) return WithConstant<kMost - 1>(count, f);
  }
  f(std::integral_constant<int, kMost>());
}

// Memory that a thread keeps from call to call, aligned to a cache line, so that no register straddles two lines.
template <typename Value>
class Scratch {
 public:
  // Returns room for `count` values, which are uninitialised.
  Value* Get(int64_t count) {
    const size_t lines = (count * sizeof(Value) + sizeof(Line) - 1) / sizeof(Line);
    if (lines > lines_.size()) lines_.resize(lines);
    return reinterpret_cast<Value*>(lines_.data());
  }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  std::vector<Line> lines_;
};

}  // namespace native

#endif  // PALLAS_KERNELS_NATIVE_WORK_H_
