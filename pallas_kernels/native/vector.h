// Registers full of numbers, by the compilers' vector extensions: one source for every processor.
//
// Memory is read as words of 32 bits: one float32 number each, or two neighbours in bfloat16. A bfloat16 number is the
// upper half of a float32 one, so a shift and a mask widen the two of each word, and nothing changes its lane.

#ifndef PALLAS_KERNELS_NATIVE_VECTOR_H_
#define PALLAS_KERNELS_NATIVE_VECTOR_H_

#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

// Precedes a loop over an array of registers, which stays in registers only if the loop is unrolled.
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

namespace native {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kNumRegisters = 32;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32, kNumRegisters = 16;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16, kNumRegisters = 32;
#else
constexpr int kVectorBytes = 16, kNumRegisters = 16;
#endif
constexpr int kLanes = kVectorBytes / 4;
constexpr int64_t kCacheLine = 64;

typedef float F32 __attribute__((vector_size(kVectorBytes)));
typedef int32_t I32 __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));

template <typename Value>
inline Value Load(const void* p) {
  Value x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

template <typename Value>
inline void Store(void* p, Value x) {
  std::memcpy(p, &x, sizeof x);
}

inline F32 Splat(uint32_t word) { return (F32)(Words{} + word); }
inline F32 Splat(float number) { return number - F32{}; }  // an addition would remain, for it makes 0 of -0

// Returns the larger one in each lane; b where the comparison with NaN fails. `a > b ? a : b` of vectors would not
// become one instruction.
inline F32 Max(F32 a, F32 b) {
  float x[kLanes], y[kLanes];
  Store(x, a), Store(y, b);
  for (int i = 0; i < kLanes; ++i) x[i] = x[i] > y[i] ? x[i] : y[i];
  return Load<F32>(x);
}

// Returns the lanes from(0), from(1), ... of a followed by b.
template <typename Vector, typename From, int... i>
inline Vector Pick(Vector a, Vector b, From from, std::integer_sequence<int, i...>) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, from(i)...);
#else
  return __builtin_shuffle(a, b, decltype(a < b){from(i)...});
#endif
}
template <typename Vector, typename From>
inline Vector Pick(Vector a, Vector b, From from) {
  return Pick(a, b, from, std::make_integer_sequence<int, sizeof(Vector) / 4>());
}

// Prefetches memory into the second-level cache: the first is too small for the data in use and the next. It must be
// inline, and so must its callers: GCC 12 takes a function that only prefetches for one without effect, and drops its
// calls.
[[gnu::always_inline]] inline void Prefetch(const char* p, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += kCacheLine) __builtin_prefetch(p + line, 0, 2);
}

// Hides a pointer or a number from the optimiser, so that it reads the memory again rather than keep the value in a
// register that sums need.
template <typename Value>
inline void Forget(Value& place) {
  asm volatile("" : "+r"(place));
}

// Formats of numbers in memory. `Read` reads kBytes into a register, with kValues numbers in a word. In a product each
// word of the right side, as it is, is multiplied by kFactors words of the left side, which `Widen` has prepared.
struct Float32 {
  using Value = float;
  static constexpr int kBytes = kVectorBytes, kValues = 1, kFactors = 1;
  static Words Read(const char* p) { return Load<Words>(p); }
  static float ToFloat(Value x) { return x; }
  static Value FromFloat(float x) { return x; }
  static constexpr uint32_t kMagnitude = 0x7fffffff;  // the bits of a word that are not signs
  static F32 Number(Words words, int) { return (F32)words; }
  static Words Narrow(const F32* numbers) { return (Words)numbers[0]; }
  static F32 AddProduct(F32 sum, F32 factor, Words words, int) { return sum + factor * (F32)words; }
};

struct BFloat16 {
  using Value = uint16_t;
  static constexpr int kBytes = kVectorBytes, kValues = 2;
  static Words Read(const char* p) { return Load<Words>(p); }
  static float ToFloat(Value x) { return Load<float>(std::array<Value, 2>{0, x}.data()); }
  static Value FromFloat(float x) {
    const uint32_t bits = Load<uint32_t>(&x);
    return (x == x ? bits + (0x7fffu + (bits >> 16 & 1u)) : bits | 0x400000u) >> 16;
  }
  static constexpr uint32_t kMagnitude = 0x7fff7fff;
  static F32 Number(Words words, int i) { return (F32)(i == 0 ? words << 16 : words & 0xffff0000u); }
  // Rounds to nearest, ties to even.
  static Words Narrow(const F32* numbers) {
    Words rounded[2];
    UNROLL
    for (int i = 0; i < 2; ++i) {
      const Words bits = (Words)numbers[i];
      rounded[i] = numbers[i] == numbers[i] ? bits + (0x7fffu + (bits >> 16 & 1u)) : bits | 0x400000u;
    }
    return rounded[0] >> 16 | (rounded[1] & 0xffff0000u);
  }
#ifdef __AVX512BF16__
  static constexpr int kFactors = 1;
  static F32 AddProduct(F32 sum, F32 factor, Words words, int) {
    return _mm512_dpbf16_ps(sum, (__m512bh)factor, (__m512bh)words);
  }
#else
  static constexpr int kFactors = 2;
  static F32 AddProduct(F32 sum, F32 factor, Words words, int i) { return sum + factor * Number(words, i); }
#endif
};

}  // namespace native

#endif  // PALLAS_KERNELS_NATIVE_VECTOR_H_
