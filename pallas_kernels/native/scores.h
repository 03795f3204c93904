// Scores: dot products of queries with keys.

#ifndef PALLAS_KERNELS_NATIVE_SCORES_H_
#define PALLAS_KERNELS_NATIVE_SCORES_H_

#include "attention_job.h"

namespace native {

// The rows and the tokens of K that are multiplied at once. Sums stay in registers, and there are enough of them to
// hide the latency of an addition.
constexpr int kDotRows = 4;
constexpr int DotTokens(int rows) {
  return kNumRegisters == 32 ? (rows == 1 ? 8 : 4) : rows == 1 ? 8 : rows < 4 ? 4 : 2;
}

// Writes a row of q as `Dot` reads it. Where the last register of K overlaps the one before, factors are zero.
template <typename T, typename C>
void Spread(const typename T::Value* q, int64_t head_dim, int64_t width, uint32_t* factors) {
  constexpr int64_t kNumbers = kLanes * C::kValues;  // of a register
  for (int64_t first = 0; first < width; first += kNumbers) {
    const typename T::Value* numbers = q + first;
    typename T::Value edge[kNumbers] = {};
    if (first + kNumbers > head_dim) {
      const int64_t again = std::max<int64_t>(first + kNumbers - width, 0);
      std::copy(q + std::min(first, head_dim), q + std::min(first - again + kNumbers, head_dim), edge + again);
      numbers = edge;
    }
    if constexpr (std::is_same_v<T, C>) {
      const Words words = Load<Words>(numbers);
      for (int i = 0; i < T::kFactors; ++i, factors += kLanes) {
        Store(factors, T::kFactors == 1 ? (F32)words : T::Number(words, i));
      }
    } else {
      for (int64_t i = 0; i < kNumbers; ++i) Store(factors++, T::ToFloat(numbers[i]));
    }
  }
}

// Adds neighbouring units of kUnit lanes, within each kDomain lanes: those of a, then those of b.
template <int kUnit, int kDomain>
inline F32 PairSums(F32 a, F32 b) {
  constexpr auto first = [](int i) {
    const int unit = i % kDomain / kUnit, half = std::max(kDomain / kUnit / 2, 1);
    return i / kDomain * kDomain + unit % half * 2 * kUnit + i % kUnit + unit / half * kLanes;
  };
  return Pick(a, b, first) + Pick(a, b, [=](int i) { return first(i) + kUnit; });
}

template <int kRows>
struct Registers {
  F32 row[kRows];
};

// Adds a's and b's neighbours: first within each four lanes, which is cheap, then across them.
template <int kCount, int kRows>
inline Registers<kRows> Fold(Registers<kRows> a, Registers<kRows> b) {
  UNROLL
  for (int r = 0; r < kRows; ++r) {
    a.row[r] = kCount <= 4 ? PairSums<1, 4>(a.row[r], b.row[r]) : PairSums<4, kLanes>(a.row[r], b.row[r]);
  }
  return a;
}

// Combines the sums of kCount tokens, where each register already has those of kUnit tokens, side by side.
template <int kUnit, int kRows, size_t kCount>
[[gnu::always_inline]] inline Registers<kRows> Folded(const Registers<kRows> (&sum)[kCount]) {
  if constexpr (kCount == 1) {
    return sum[0];
  } else {
    Registers<kRows> half[kCount / 2];
    UNROLL
    for (size_t t = 0; t < kCount / 2; ++t) half[t] = Fold<2 * kUnit>(sum[2 * t], sum[2 * t + 1]);
    return Folded<2 * kUnit>(half);
  }
}

// Computes dot products of kRows rows with kCount tokens from `token` on: side by side, each as kLanes / kCount partial
// sums. It prefetches some tokens of `next` at a time: all at once would take longer than the computation.
template <typename C, int kRows, int kCount>
[[gnu::always_inline]] inline Registers<kRows> Dots(const uint32_t* const* x, Heads k, int64_t token, int64_t bytes,
                                                     NextHeads& next) {
  if constexpr (kCount > DotTokens(kRows)) {
    const auto first = Dots<C, kRows, kCount / 2>(x, k, token, bytes, next);
    return Fold<kCount>(first, Dots<C, kRows, kCount / 2>(x, k, token + kCount / 2, bytes, next));
  } else {
    const char* heads[kCount];
    Registers<kRows> sum[kCount] = {};
    UNROLL
    for (int t = 0; t < kCount; ++t) {
      next.Ask();
      heads[t] = k[token + t];
    }
    for (int64_t byte = 0, i = 0; byte < bytes; byte += C::kBytes) {
      const int64_t here = std::min(byte, bytes - C::kBytes);
      UNROLL
      for (int j = 0; j < C::kFactors; ++j, i += kLanes) {
        UNROLL
        for (int t = 0; t < kCount; ++t) {
          const char* numbers = heads[t] + here;
          Forget(numbers);
          const Words words = C::Read(numbers);
          UNROLL
          for (int r = 0; r < kRows; ++r) {
            sum[t].row[r] = C::AddProduct(sum[t].row[r], Load<F32>(x[r] + i), words, j);
          }
        }
      }
    }
    return Folded<1>(sum);
  }
}

// Computes y[row] = dot products of x[row] with the tokens [first, end) of K, in whole registers.
template <typename C, int kRows>
[[gnu::noinline]] void Dot(const uint32_t* const* x, Heads k, int64_t first, int64_t end, int64_t bytes,
                           NextHeads next, float* const* y) {
  for (int64_t token = first; token < end; token += kLanes) {
    const auto dots = Dots<C, kRows, kLanes>(x, k, token, bytes, next);
    for (int r = 0; r < kRows; ++r) Store(y[r] + token, dots.row[r]);
  }
}

// Computes weights = q.k of few rows, from K as it lies, with sums across the lanes of registers.
template <typename T, typename C>
void ScoreFew(const Job<T, C>& job) {
  constexpr int64_t kChunk = Packing<C>::kChunk;
  for (int64_t chunk = 0; chunk < job.num_tokens; chunk += kChunk) {
    for (int64_t head = 0; head < job.num_heads; ++head) {
      const Heads k = job.ChunkOfK(head, chunk);
      InBlocks(job.num_rows, kDotRows, [&](int64_t row, int64_t count) {
        if (!job.Sees(row, count, chunk, kChunk)) return;
        const int64_t first = std::max<int64_t>(job.begin(row) - chunk, 0) / kLanes * kLanes;
        const int64_t end = std::min(job.end(row + count - 1) - chunk, kChunk);
        const NextHeads next = row == 0 ? job.AfterK(head, chunk + kChunk) : NextHeads{};
        const uint32_t* x[kDotRows];
        float* y[kDotRows];
        for (int64_t i = 0; i < count; ++i) {
          x[i] = job.factors + job.index(head, row + i) * job.num_factors;
          y[i] = job.weight(head, row + i) + chunk;
        }
        WithConstant<kDotRows>(count, [&](auto rows) {
          Dot<C, rows>(x, k, first, end, job.width * sizeof(typename C::Value), next, y);
        });
      });
    }
  }
}

// For many rows K is transposed once, so that each lane has a token and nothing is summed across lanes. A row's sums
// equal those of `Dots` bit by bit: one partial sum for each lane that a word had, added in the order of `Folded`.

// The rows and tokens of a tile, whose sums stay in registers.
constexpr int kTileRows = kNumRegisters == 32 ? 8 : kLanes == 8 ? 6 : 3, kTileVectors = kTileRows == 3 ? 4 : 2;
constexpr int64_t kTileTokens = kTileVectors * kLanes, kTileBytes = 4 * kTileTokens;

// Transposes: lane i of register j becomes lane j of register i. Halves change places, then quarters, and so on.
template <int kStep = kLanes / 2>
[[gnu::always_inline]] inline void Turn(Words (&words)[kLanes]) {
  UNROLL
  for (int i = 0; i < kLanes; ++i) {
    if (i & kStep) continue;
    const Words a = words[i], b = words[i + kStep];
    words[i] = Pick(a, b, [](int lane) { return lane & kStep ? lane - kStep + kLanes : lane; });
    words[i + kStep] = Pick(a, b, [](int lane) { return lane & kStep ? lane + kLanes : lane + kStep; });
  }
  if constexpr (kStep > 1) Turn<kStep / 2>(words);
}

// Transposes K of kLanes tokens: `turned`[lane, i] has word `lane` of each token's register i, side by side.
template <typename C>
void TurnHeads(Heads k, int64_t token, int64_t bytes, int64_t num_registers, char* turned) {
  for (int64_t i = 0; i < num_registers; ++i) {
    const int64_t here = std::min(i * C::kBytes, bytes - C::kBytes);
    Words words[kLanes];
    UNROLL
    for (int t = 0; t < kLanes; ++t) words[t] = C::Read(k[token + t] + here);
    Turn(words);
    UNROLL
    for (int lane = 0; lane < kLanes; ++lane) Store(turned + (lane * num_registers + i) * kTileBytes, words[lane]);
  }
}

struct TileSums {
  F32 of[kTileRows][kTileVectors];
};

// Adds kCount of the words' lanes, from kFirst on.
template <typename C, int kFirst, int kCount>
[[gnu::always_inline]] inline TileSums LaneSums(const uint32_t* const* x, const char* turned, int64_t num_registers) {
  TileSums sums = {};
  if constexpr (kCount > 1) {
    sums = LaneSums<C, kFirst, kCount / 2>(x, turned, num_registers);
    const TileSums others = LaneSums<C, kFirst + kCount / 2, kCount / 2>(x, turned, num_registers);
    UNROLL
    for (int r = 0; r < kTileRows; ++r) {
      UNROLL
      for (int v = 0; v < kTileVectors; ++v) sums.of[r][v] += others.of[r][v];
    }
  } else {
    const char* words = turned + kFirst * num_registers * kTileBytes;
    const uint32_t* factors[kTileRows];
    UNROLL
    for (int r = 0; r < kTileRows; ++r) factors[r] = x[r] + kFirst;
    int64_t i = 0;
    do {
      Words k[kTileVectors];
      UNROLL
      for (int v = 0; v < kTileVectors; ++v) k[v] = Load<Words>(words + i * kTileBytes + v * kVectorBytes);
      UNROLL
      for (int j = 0; j < C::kFactors; ++j) {
        UNROLL
        for (int r = 0; r < kTileRows; ++r) {
          const F32 factor = Splat(factors[r][(i * C::kFactors + j) * kLanes]);
          UNROLL
          for (int v = 0; v < kTileVectors; ++v) sums.of[r][v] = C::AddProduct(sums.of[r][v], factor, k[v], j);
        }
      }
    } while (++i < num_registers);
  }
  return sums;
}

// Computes y[row] = dot products of kTileRows rows with kTileTokens tokens.
template <typename C>
[[gnu::noinline]] void DotTile(const uint32_t* const* x, const char* turned, int64_t num_registers, float* const* y) {
  const TileSums sums = LaneSums<C, 0, kLanes>(x, turned, num_registers);
  UNROLL
  for (int r = 0; r < kTileRows; ++r) {
    UNROLL
    for (int v = 0; v < kTileVectors; ++v) Store(y[r] + v * kLanes, sums.of[r][v]);
  }
}

// Computes weights = q.k of at least kTileRows rows.
template <typename T, typename C>
void ScoreMany(const Job<T, C>& job) {
  constexpr int64_t kChunk = Packing<C>::kChunk;
  const int64_t bytes = job.width * sizeof(typename C::Value), num_registers = (bytes + C::kBytes - 1) / C::kBytes;
  const int64_t tile_bytes = kLanes * num_registers * kTileBytes;
  const int64_t num_blocks = (job.num_rows + kTileRows - 1) / kTileRows;
  thread_local Scratch<char> scratch;
  char* turned = scratch.Get(kChunk / kTileTokens * tile_bytes);  // [tiles, kLanes, num_registers, kTileTokens]
  for (int64_t chunk = 0; chunk < job.num_tokens; chunk += kChunk) {
    for (int64_t head = 0; head < job.num_heads; ++head) {
      const Heads k = job.ChunkOfK(head, chunk);
      for (int64_t t = 0; t < kChunk; t += kLanes) {
        TurnHeads<C>(k, t, bytes, num_registers, turned + t / kTileTokens * tile_bytes + t % kTileTokens * 4);
      }
      NextHeads next = job.AfterK(head, chunk + kChunk);
      for (int64_t block = 0; block < num_blocks; ++block) {
        next.AskPart(block, num_blocks, kChunk);
        // The last block may overlap the one before: these rows get the same sums again.
        const int64_t row = std::min(block * kTileRows, job.num_rows - kTileRows);
        if (!job.Sees(row, kTileRows, chunk, kChunk)) continue;
        const int64_t end = std::min(job.end(row + kTileRows - 1) - chunk, kChunk);
        int64_t tile = std::max<int64_t>(job.begin(row) - chunk, 0) / kTileTokens;
        for (; tile * kTileTokens < end; ++tile) {
          const uint32_t* x[kTileRows];
          float* y[kTileRows];
          for (int64_t i = 0; i < kTileRows; ++i) {
            x[i] = job.factors + job.index(head, row + i) * job.num_factors;
            y[i] = job.weight(head, row + i) + chunk + tile * kTileTokens;
          }
          DotTile<C>(x, turned + tile * tile_bytes, num_registers, y);
        }
      }
    }
  }
}

// Computes weights = q.k for all rows and tokens, a chunk of tokens at a time, which stays in the first-level cache.
template <typename T, typename C>
void Score(const Job<T, C>& job) {
  if constexpr (Packing<C>::kChunk % kTileTokens == 0) {
    if (job.num_rows >= 2 * kTileRows) return ScoreMany(job);
  }
  ScoreFew(job);
}

}  // namespace native

#endif  // PALLAS_KERNELS_NATIVE_SCORES_H_
