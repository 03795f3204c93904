// Weights from scores: caps and slopes, and their softmax without the division by the sum.

#ifndef PALLAS_KERNELS_NATIVE_SOFTMAX_H_
#define PALLAS_KERNELS_NATIVE_SOFTMAX_H_

#include <algorithm>
#include <limits>

#include "vector.h"

namespace native {

// Computes 2^x for x <= 0 as 2^n 2^r with |r| <= 1/2. 2^r is the minimax polynomial of its degree that is 1 at 0; its
// error is at most 1.7e-7 in float32.
inline F32 Exp2(F32 x) {
  x = Max(x, Splat(-126.0f));
  // Float32 numbers from 2^23 on are integers, so the first sum rounds, and has n in its lowest bits.
  const F32 shifted = x + 12582912.0f, r = x - (shifted - 12582912.0f);
  F32 p = Splat(1.326470869e-3f);
  for (const float c : {9.671511129e-3f, 5.550733954e-2f, 2.402224243e-1f, 6.931470037e-1f, 1.0f}) p = p * r + c;
  return (F32)((Words)p + ((Words)shifted << 23));
}

// Computes tanh(x): by e^(-2|x|), or near 0, where its rounding would be seen, by the minimax polynomial of tanh(x)/x - 1
// in x^2 that is 0 at 0. The error is at most 2.5e-7 of the result.
inline F32 Tanh(F32 x) {
  const F32 size = (F32)((Words)x & 0x7fffffffu), power = Exp2(size * -2.88539008f), square = x * x;
  F32 p = Splat(-6.647485439e-3f);
  for (const float c : {2.129798989e-2f, -5.389919028e-2f, 1.333296425e-1f, -3.333332688e-1f}) p = p * square + c;
  const F32 near = size + size * (square * p), far = (1.0f - power) / (1.0f + power);
  return (F32)((Words)(size < Splat(0.5f) ? near : far) | ((Words)x & 0x80000000u));
}

// Reduces all lanes with f, each with the one half a register further, so that it does not matter which lane has the
// first token.
template <typename F>
inline float Across(F32 x, F f) {
  float lanes[kLanes];
  Store(lanes, x);
  UNROLL
  for (int half = kLanes / 2; half > 0; half /= 2) {
    UNROLL
    for (int i = 0; i < half; ++i) lanes[i] = f(lanes[i], lanes[i + half]);
  }
  return lanes[0];
}

// A mask of all lanes.
struct AllLanes {};
inline F32 Where(I32 counts, F32 x, float otherwise) { return counts ? x : Splat(otherwise); }
inline F32 Where(AllLanes, F32 x, float) { return x; }

// Calls f(first token, mask of lanes that count) for the registers with the tokens [begin, end).
template <typename F>
inline void ForTokens(int64_t begin, int64_t end, F f) {
  I32 lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  const auto edge = [&](int64_t first) {
    const I32 token = lane + static_cast<int32_t>(first);
    f(first, token >= static_cast<int32_t>(begin) & token < static_cast<int32_t>(end));
  };
  int64_t first = begin / kLanes * kLanes;
  if (first < begin) edge(first), first += kLanes;
  for (; first + kLanes <= end; first += kLanes) f(first, AllLanes());
  if (first < end) edge(first);
}

// What changes a row's scores: soft_cap * tanh(score / soft_cap) unless it is 0; slope * (token - own token) is added; a
// sink is a score without a token.
struct Changes {
  float soft_cap = 0, slope = 0, sink = -std::numeric_limits<float>::infinity();
};

// Sets weights = scale * weights, changed, for the tokens [begin, end). The row's own token is the last.
inline void Change(float* weights, int64_t begin, int64_t end, float scale, Changes changes) {
  F32 lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  ForTokens(begin, end, [&](int64_t first, auto) {
    F32 score = Load<F32>(weights + first);
    score = changes.soft_cap == 0 ? score * scale : changes.soft_cap * Tanh(score * (scale / changes.soft_cap));
    if (changes.slope != 0) score += changes.slope * (lane + static_cast<float>(first - end + 1));
    Store(weights + first, score);
  });
}

// Sets weights = exp(scale * (weights - maximum)) for the tokens [begin, end), and 0 for others. Returns their sum, with
// that of a sink.
inline float Soften(float* weights, int64_t num_tokens, int64_t begin, int64_t end, float scale,
                    float sink = -std::numeric_limits<float>::infinity()) {
  if (scale < 0) {
    for (int64_t token = 0; token < num_tokens; ++token) weights[token] = -weights[token];
    scale = -scale;
  }
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  const float factor = scale * 1.44269504f;  // powers of 2 are less work
  F32 largest = Splat(sink), sum = {};
  ForTokens(begin, end, [&](int64_t first, auto counts) {
    const F32 score = Where(counts, Load<F32>(weights + first), kLowest);
    largest = Max(score, largest);
  });
  const float top = Across(largest, [](float a, float b) { return a > b ? a : b; });
  ForTokens(begin, end, [&](int64_t first, auto counts) {
    const F32 weight = Where(counts, Exp2((Load<F32>(weights + first) - top) * factor), 0.0f);
    sum += weight;
    Store(weights + first, weight);
  });
  const int64_t behind = (end + kLanes - 1) / kLanes * kLanes;
  std::fill(weights, weights + begin / kLanes * kLanes, 0.0f);
  std::fill(weights + behind, weights + num_tokens, 0.0f);
  const float total = Across(sum, [](float a, float b) { return a + b; });
  return sink == kLowest ? total : total + Exp2(Splat((sink - top) * factor))[0];
}

}  // namespace native

#endif  // PALLAS_KERNELS_NATIVE_SOFTMAX_H_
