// Caches of 4 bits a number, as `layouts/int4_grouped.py` has them: code * scale + zero.
//
// A scale of K belongs to a channel of 16 tokens, which are a chunk. A head of a chunk is unpacked once for all rows,
// into 16 x head_dim float32 numbers. These stay in the first-level cache, and are multiplied from there.

#ifndef PALLAS_KERNELS_NATIVE_NIBBLES_H_
#define PALLAS_KERNELS_NATIVE_NIBBLES_H_

#include "attention.h"
#include "bytes.h"

namespace native {

// The type of an unpacked cache, for a computation in T.
template <typename T>
struct Nibbles : Float32 {};

// The codes in the low and in the high bits of bytes: a register of neighbouring ones, or a single one.
template <typename Number>
struct Codes {
  Number low, high;
};

template <typename Number>
inline Codes<Number> ReadCodes(const char* p) {
  if constexpr (std::is_same_v<Number, F32>) {
    const I32 bytes = Widened<uint8_t>(p);
    return {__builtin_convertvector(bytes & 15, F32), __builtin_convertvector(bytes >> 4, F32)};
  } else {
    const int byte = Load<uint8_t>(p);
    return {static_cast<float>(byte & 15), static_cast<float>(byte >> 4)};
  }
}

template <typename Number>
inline Number ReadBFloat16(const uint16_t* p) {
  if constexpr (std::is_same_v<Number, F32>) {
    typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
    return (F32)(__builtin_convertvector(Load<Halves>(p), Words) << 16);
  } else {
    return BFloat16::ToFloat(*p);
  }
}

template <typename T>
struct Packing<Nibbles<T>> {
  static constexpr bool kIsPacked = true;
  static constexpr int64_t kChunk = 16, kAlignment = kChunk;
  static int64_t HeadBytes(int64_t head_dim) { return head_dim / 2; }

  const uint16_t *k_scale, *k_zero, *v_scale, *v_zero;  // bfloat16
  const typename T::Value* k_new;
  const int32_t* new_group;  // [num_blocks]: the group of each block whose K is in k_new, -1 for none
  int64_t block_size;
  // In numbers: of K's scales, where tokens count groups; of V's scales; of k_new.
  Strides of_groups, of_tokens, of_new;

  // Unpacks K of one head for a chunk of tokens, the first of which is in `slot`, into rows of `width` float32 numbers.
  void UnpackK(Heads codes, int64_t slot, int64_t head, int64_t head_dim, int64_t width, char* out) const {
    const int64_t block = slot / block_size, group = slot % block_size / kChunk;
    float* rows = reinterpret_cast<float*>(out);
    if (new_group[block] == group) {
      for (int64_t t = 0; t < kChunk; ++t) {
        const typename T::Value* row = k_new + of_new.At(block, t) + head * of_new.head;
        for (int64_t d = 0; d < head_dim; ++d) rows[t * width + d] = T::ToFloat(row[d]);
      }
      return;
    }
    const int64_t first = of_groups.At(block, group) + head * of_groups.head;
    InRegisters(head_dim / 2, [&](int64_t d, auto number) {
      using Number = decltype(number);
      const int64_t low = first + d, high = low + head_dim / 2;
      const Number low_scale = ReadBFloat16<Number>(k_scale + low), high_scale = ReadBFloat16<Number>(k_scale + high);
      const Number low_zero = ReadBFloat16<Number>(k_zero + low), high_zero = ReadBFloat16<Number>(k_zero + high);
      for (int64_t t = 0; t < kChunk; ++t) {
        const auto found = ReadCodes<Number>(codes[t] + d);
        Store(rows + t * width + d, found.low * low_scale + low_zero);
        Store(rows + t * width + d + head_dim / 2, found.high * high_scale + high_zero);
      }
    });
  }

  void UnpackV(Heads codes, int64_t slot, int64_t head, int64_t head_dim, int64_t width, char* out) const {
    const int64_t block = slot / block_size, offset = slot % block_size;
    for (int64_t t = 0; t < kChunk; ++t) {
      const int64_t place = of_tokens.At(block, offset + t) + head * of_tokens.head;
      const float scale = BFloat16::ToFloat(v_scale[place]), zero = BFloat16::ToFloat(v_zero[place]);
      float* row = reinterpret_cast<float*>(out) + t * width;
      Prefetch(codes[t + kChunk], head_dim / 2);
      InRegisters(head_dim / 2, [&](int64_t d, auto number) {
        const auto found = ReadCodes<decltype(number)>(codes[t] + d);
        Store(row + d, found.low * scale + zero);
        Store(row + d + head_dim / 2, found.high * scale + zero);
      });
    }
  }

 private:
  // Calls f(offset, a register) to cover `count` bytes; the last register may overlap the one before it. Fewer bytes
  // than a register holds are passed one by one, as f(offset, a float).
  template <typename F>
  static void InRegisters(int64_t count, F f) {
    if (count < kLanes) {
      for (int64_t d = 0; d < count; ++d) f(d, float());
      return;
    }
    for (int64_t d = 0; d < count; d += kLanes) f(std::min(d, count - kLanes), F32{});
  }
};

}  // namespace native

#endif  // PALLAS_KERNELS_NATIVE_NIBBLES_H_
