// What the kernels for CPUs with AVX-512 share: the two types of numbers, and how work is shared among threads.

#ifndef PALLAS_KERNELS_NATIVE_COMMON_H_
#define PALLAS_KERNELS_NATIVE_COMMON_H_

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "xla/ffi/api/ffi.h"

namespace native {

namespace ffi = xla::ffi;

constexpr int64_t kLanes = 16;  // float32 numbers in a register
constexpr int64_t kCacheLine = 64;

// The lanes of a register whose first is number `first` of `count` that exist.
inline uint32_t Existing(int64_t first, int64_t count, int64_t lanes) {
  const int64_t number = std::clamp<int64_t>(count - first, 0, lanes);
  return static_cast<uint32_t>((uint64_t{1} << number) - 1);
}

struct Float32 {
  using Value = float;
  using Pair = float;  // what a lane takes at a time from each side of a dot product
  static constexpr int64_t kPairLanes = 16;
  static __m512 Pairs(const Value* p, uint32_t mask) {
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), p);
  }
  static bool IsNotZero(Value x) { return x != 0; }
  static __m512 Broadcast(const Pair* p) { return _mm512_set1_ps(*p); }
  static __m512 AddProduct(__m512 sum, __m512 a, __m512 b) { return _mm512_fmadd_ps(a, b, sum); }
  static __m512 Widen(const Value* p, uint32_t mask) { return Pairs(p, mask); }
  static void Store(Value* p, uint32_t mask, __m512 x) {
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>(mask), x);
  }
};

#ifdef __AVX512BF16__
struct BFloat16 {
  using Value = uint16_t;
  using Pair = uint32_t;
  static constexpr int64_t kPairLanes = 32;
  static __m512 Pairs(const Value* p, uint32_t mask) {
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, p));
  }
  static bool IsNotZero(Value x) { return (x & 0x7fff) != 0; }
  static __m512 Broadcast(const Pair* p) { return _mm512_castsi512_ps(_mm512_set1_epi32(*p)); }
  static __m512 AddProduct(__m512 sum, __m512 a, __m512 b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
  static __m512 Widen(const Value* p, uint32_t mask) {
    const __m256i halves = _mm256_maskz_loadu_epi16(static_cast<__mmask16>(mask), p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }
  static void Store(Value* p, uint32_t mask, __m512 x) {
    _mm256_mask_storeu_epi16(p, static_cast<__mmask16>(mask), (__m256i)_mm512_cvtneps_pbh(x));
  }
};
#endif

// Calls work(item, next item) for all items: from this thread, and from those of XLA's pool that come in time.
// Nobody waits for a thread that has not begun, so calls that fill the pool cannot wait for each other for ever.
template <typename Work>
void Share(ffi::ThreadPool pool, int64_t num_items, Work work) {
  struct Progress {
    std::atomic<int64_t> taken{0}, done{0};
  };
  auto progress = std::make_shared<Progress>();  // a thread may come when all is done and this call is over
  const auto take_part = [=] {
    int64_t done = 0;
    for (int64_t item = progress->taken.fetch_add(1); item < num_items; ++done) {
      const int64_t next = progress->taken.fetch_add(1);
      work(item, std::min(next, num_items - 1));
      item = next;
    }
    progress->done.fetch_add(done, std::memory_order_release);
  };
  const int64_t helpers = std::min(pool.num_threads(), num_items) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(std::decay_t<decltype(take_part)>(take_part));
  take_part();
  while (progress->done.load(std::memory_order_acquire) < num_items) _mm_pause();
}

}  // namespace native

#endif  // PALLAS_KERNELS_NATIVE_COMMON_H_
