// Numbers of 8 and 16 bits, which dedicated instructions widen to vectors. They have a file of their own, because the
// header of these instructions takes the compiler a second.

#ifndef PALLAS_KERNELS_NATIVE_BYTES_H_
#define PALLAS_KERNELS_NATIVE_BYTES_H_

#include <type_traits>

#include "vector.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace native {

// 8-bit numbers, which become float32 in the register that they are read into.
template <typename Decoded>
struct Bytes {
  using Value = uint8_t;
  static constexpr int kBytes = kLanes, kValues = 1, kFactors = 1;
  static Words Read(const char* p) { return (Words)Decoded::Decode(p); }
  static F32 Number(Words words, int) { return (F32)words; }
  static F32 AddProduct(F32 sum, F32 factor, Words words, int) { return sum + factor * (F32)words; }
};

// Reads kLanes bytes as words. GCC 12 compiles the plain form to a move for each byte.
template <typename Byte>
inline I32 Widened(const char* p) {
#if defined(__AVX512F__)
  const __m128i bytes = Load<__m128i>(p);
  return (I32)(std::is_signed_v<Byte> ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_cvtsi64_si128(Load<int64_t>(p));
  return (I32)(std::is_signed_v<Byte> ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
  typedef Byte Narrow __attribute__((vector_size(kLanes)));
  return __builtin_convertvector(Load<Narrow>(p), I32);
#endif
}

// Widens floats of kBits: a sign, kExponent bits of exponent, and the fraction. Subnormal numbers are computed without
// float32 subnormals, which a processor may treat as zeros. Infinities and NaN, which are never written, become large
// numbers.
template <int kBits, int kExponent>
inline F32 Widened(Words bits) {
  constexpr uint32_t kSign = 1u << (kBits - 1), kShift = 24 - kBits + kExponent, kBias = 128 - (1 << (kExponent - 1));
  const Words magnitude = bits & (kSign - 1);
  const F32 number = (F32)((magnitude << kShift) + (kBias << 23));
  const F32 subnormal = number + number - (F32)(Words{} + ((kBias + 1) << 23));
  const F32 size = magnitude < (kSign >> kExponent) ? subnormal : number;
  return (F32)((Words)size | (bits & kSign) << (32 - kBits));
}

// A vector of 16-bit numbers, one for each lane of a register, and the instruction that widens float16.
#if defined(__AVX512F__)
#define HAS_FLOAT16
using Halves = __m256i;
inline F32 FromFloat16(Halves halves) { return _mm512_cvtph_ps(halves); }
inline Halves Doubled(const char* bytes) { return _mm256_cvtepi8_epi16(Load<__m128i>(bytes)); }
#elif defined(__AVX2__) && defined(__F16C__)
#define HAS_FLOAT16
using Halves = __m128i;
inline F32 FromFloat16(Halves halves) { return _mm256_cvtph_ps(halves); }
inline Halves Doubled(const char* bytes) { return _mm_cvtepi8_epi16(_mm_cvtsi64_si128(Load<int64_t>(bytes))); }
#endif

// Reads float16 numbers from memory.
inline F32 ReadFloat16(const char* p) {
#ifdef HAS_FLOAT16
  return FromFloat16(Load<Halves>(p));
#else
  typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
  return Widened<16, 5>(__builtin_convertvector(Load<Halves>(p), Words));
#endif
}

struct Int8 : Bytes<Int8> {
  static F32 Decode(const char* p) { return __builtin_convertvector(Widened<int8_t>(p), F32); }
};

// A float8 with 5 exponent bits is the upper half of a float16. With 4 bits its exponent bias is 8 less than float16's.
template <int kExponent>
struct Float8 : Bytes<Float8<kExponent>> {
  static F32 Decode(const char* p) {
#ifdef HAS_FLOAT16
    typedef uint16_t Bits __attribute__((vector_size(sizeof(Halves))));
    const Bits bits = (Bits)Doubled(p);
    return kExponent == 5 ? FromFloat16((Halves)(bits << 8)) : FromFloat16((Halves)(bits << 7 & 0xbf80)) * 256.0f;
#else
    return Widened<8, kExponent>((Words)Widened<uint8_t>(p));
#endif
  }
};

}  // namespace native

#endif  // PALLAS_KERNELS_NATIVE_BYTES_H_
