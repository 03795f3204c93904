// Causal attention of tiles of query tokens over paged K and V: `ops.tiled_paged_attention`.
//
// K and V are read where they lie, once for the query heads that share them, and as far as a query sees: time follows
// the tokens that live, and nothing is gathered. Sums are in float32, and so are the softmax's weights. A query's bits
// depend on its own tokens alone.

#ifndef PALLAS_KERNELS_NATIVE_ATTENTION_H_
#define PALLAS_KERNELS_NATIVE_ATTENTION_H_

#include <limits>

#include "vector.h"
#include "work.h"

namespace native {

// What is multiplied at once: rows with tokens of K, rows with groups of V's columns. Sums stay in registers, and are
// enough of them to hide how long an addition takes.
constexpr int kDotRows = 4;
constexpr int DotTokens(int rows) {
  return kNumRegisters == 32 ? (rows == 1 ? 8 : 4) : rows == 1 ? 8 : rows < 4 ? 4 : 2;
}
constexpr int kSumRows = kNumRegisters == 32 ? 4 : kLanes == 8 ? 6 : 3;
constexpr int kSumVectors = kSumRows == 6 ? 2 : 4;
constexpr int SumGroups(int rows) { return std::clamp(12 / (rows * kSumVectors), 1, 4); }
constexpr int64_t kGroup = kSumVectors * kLanes;  // columns

// From one block, token and head to the next.
struct Strides {
  int64_t block, token, head;
  int64_t At(int64_t block_id, int64_t offset) const { return block_id * block + offset * token; }
};

// What packed numbers of K and V need to be unpacked (`nibbles.h`); others are read where they lie.
template <typename C>
struct Packing {
  static constexpr bool kIsPacked = false;
  static constexpr int64_t kChunk = 32;  // tokens whose K or V stays in the first-level cache for all rows
  static int64_t HeadBytes(int64_t head_dim) { return head_dim * sizeof(typename C::Value); }
  // Tokens are looked at from a multiple of so many on.
  static constexpr int64_t kAlignment = 1;
};

// Queries and outputs are numbers of T, those of K and V of C.
template <typename T, typename C>
struct AttentionCall {
  const typename T::Value* q;
  const char *k, *v;  // of block 0, its first token and head
  const int32_t *block_tables, *query_starts, *seq_lens;
  const float *k_scales, *v_scales;  // what numbers of K and V are to be multiplied by; null: by nothing
  typename T::Value* out;
  int64_t num_tiles, tile_len, num_q_heads, head_dim, num_kv_heads, block_size, max_blocks;
  Strides strides;        // of K and V, in bytes
  Strides scale_strides;  // in numbers
  float scale;
  int64_t window;
  Packing<C> packing{};
  // Block i of the tables is block first_block + i * block_stride of the arrays.
  int64_t first_block = 0, block_stride = 1;
  const int32_t* table_rows = nullptr;  // of each tile; null: in their order

  const int32_t* TableOf(int64_t tile) const { return block_tables + (table_rows ? table_rows[tile] : tile) * max_blocks; }

  int64_t head_bytes() const { return Packing<C>::HeadBytes(head_dim); }
};

// Where a head of K or V lies, for some tokens.
struct Heads {
  const char* base;
  const int64_t* offsets;
  const char* operator[](int64_t token) const { return base + offsets[token]; }
};

// One tile and some of its kv heads: the rows of queries that share each of these, and the tokens that some row sees,
// counted from the first, in whole chunks. A row is one head of one token.
template <typename T, typename C>
struct Job {
  static constexpr int64_t kChunk = Packing<C>::kChunk;
  const AttentionCall<T, C>& call;
  int64_t first_head, num_heads, num_rows, num_tokens;
  int64_t width, num_groups;  // of a head: narrow ones are read as if they had a whole group of columns
  int64_t num_factors;        // of a query
  const char *k, *v;          // of the first kv head
  int64_t* offsets;           // [num_tokens + kChunk]: from k and v, in bytes, and behind these from `copy`
  int64_t* scale_offsets;     // [num_tokens]: from the first scale of a head; of packed numbers the slots
  int64_t* ends;              // [num_rows]: how many tokens there are up to a row's own
  int64_t* places;            // [num_heads, num_rows]: in q and out
  uint32_t* factors;          // [num_heads, num_rows, num_factors]
  float* weights;             // [num_heads, num_rows, num_tokens]
  float* totals;              // [num_heads, num_rows], of weights
  float* sums;                // [num_heads, num_rows, num_groups * kGroup]
  char* copy;                 // [kChunk, width], of narrow heads and of unpacked ones

  int64_t index(int64_t head, int64_t row) const { return head * num_rows + row; }
  float* weight(int64_t head, int64_t row) const { return weights + index(head, row) * num_tokens; }
  int64_t begin(int64_t row) const { return std::max<int64_t>(ends[row] - call.window, 0); }
  // Whether one of `count` rows sees one of `tokens` tokens.
  bool Sees(int64_t row, int64_t count, int64_t token, int64_t tokens) const {
    return token < ends[row + count - 1] && begin(row) < token + tokens;
  }
  // The first column of a group. The last group ends with the head, and begins within the one before.
  int64_t column(int64_t group) const { return std::min(group * kGroup, width - kGroup); }
  Heads At(const char* base, int64_t head, int64_t token) const {
    return {base + head * call.strides.head, offsets + token};
  }
  // A chunk of tokens, of which whole registers can be read.
  Heads Chunk(const char* base, int64_t head, int64_t token) const {
    const Heads heads = At(base, head, token), copies{copy, offsets + num_tokens};
    if (width == call.head_dim) return heads;
    for (int64_t i = 0; i < kChunk; ++i) std::memcpy(copy + copies.offsets[i], heads[i], call.head_bytes());
    return copies;
  }
  Heads ChunkOfK(int64_t head, int64_t token) const {
    if constexpr (Packing<C>::kIsPacked) {
      call.packing.UnpackK(At(k, head, token), scale_offsets[token], first_head + head, call.head_dim, width, copy);
      return {copy, offsets + num_tokens};
    } else {
      return Chunk(k, head, token);
    }
  }
  Heads ChunkOfV(int64_t head, int64_t token) const {
    if constexpr (Packing<C>::kIsPacked) {
      call.packing.UnpackV(At(v, head, token), scale_offsets[token], first_head + head, call.head_dim, width, copy);
      return {copy, offsets + num_tokens};
    } else {
      return Chunk(v, head, token);
    }
  }
};

// A row of q as `Dot` reads it. Where the last register of K has some words of the one before, factors are zero.
template <typename T, typename C>
void Spread(const typename T::Value* q, int64_t head_dim, int64_t width, uint32_t* factors) {
  constexpr int64_t kNumbers = kLanes * C::kValues;  // of a register
  for (int64_t first = 0; first < width; first += kNumbers) {
    typename T::Value numbers[kNumbers] = {};
    const int64_t again = std::max<int64_t>(first + kNumbers - width, 0);
    std::copy(q + std::min(first, head_dim), q + std::min(first - again + kNumbers, head_dim), numbers + again);
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

// Sums of neighbouring units of kUnit lanes, within each kDomain lanes: those of a, then those of b.
template <int kUnit, int kDomain>
inline F32 PairSums(F32 a, F32 b) {
  constexpr auto first = [](int i) {
    const int unit = i % kDomain / kUnit, half = std::max(kDomain / kUnit / 2, 1);
    return i / kDomain * kDomain + unit % half * 2 * kUnit + i % kUnit + unit / half * kLanes;
  };
  return Pick(a, b, first) + Pick(a, b, [=](int i) { return first(i) + kUnit; });
}

// Makes the compiler read again what lies there, rather than keep it in a register that sums need.
template <typename Value>
inline void Forget(const Value*& p) {
  asm volatile("" : "+r"(p));
}

template <int kRows>
struct Registers {
  F32 row[kRows];
};

// The sums of a's and of b's neighbours: first within each four lanes, which is cheap, then across them.
template <int kCount, int kRows>
inline Registers<kRows> Fold(Registers<kRows> a, Registers<kRows> b) {
  UNROLL
  for (int r = 0; r < kRows; ++r) {
    a.row[r] = kCount <= 4 ? PairSums<1, 4>(a.row[r], b.row[r]) : PairSums<4, kLanes>(a.row[r], b.row[r]);
  }
  return a;
}

// The sums of kCount tokens, each of which is the sums of kUnit of them already: side by side.
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

// Dot products of kRows rows with kCount tokens from `token` on: side by side, each in kLanes / kCount parts.
template <typename C, int kRows, int kCount>
[[gnu::always_inline]] inline Registers<kRows> Dots(const uint32_t* const* x, Heads k, int64_t token, int64_t bytes) {
  if constexpr (kCount > DotTokens(kRows)) {
    return Fold<kCount>(Dots<C, kRows, kCount / 2>(x, k, token, bytes),
                        Dots<C, kRows, kCount / 2>(x, k, token + kCount / 2, bytes));
  } else {
    const char* heads[kCount];
    Registers<kRows> sum[kCount] = {};
    UNROLL
    for (int t = 0; t < kCount; ++t) heads[t] = k[token + t];
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

// What is asked for while others are computed, token by token; 0 bytes: nothing.
struct NextHeads {
  Heads heads;
  int64_t bytes;
  void Ask(int64_t token) const { Prefetch(heads[token], bytes); }
};

// y[row] = dot products of a row, as x[row], with the tokens [first, end) of K, whole registers of them.
template <typename C, int kRows>
[[gnu::noinline]] void Dot(const uint32_t* const* x, Heads k, int64_t first, int64_t end, int64_t bytes,
                           NextHeads next, float* const* y) {
  for (int64_t token = first; token < end; token += kLanes) {
    for (int64_t i = token; i < token + kLanes; ++i) next.Ask(i);
    const auto dots = Dots<C, kRows, kLanes>(x, k, token, bytes);
    for (int r = 0; r < kRows; ++r) Store(y[r] + token, dots.row[r]);
  }
}

// weights = q.k for all rows and tokens, some tokens at a time, which meanwhile stay in the first-level cache.
template <typename T, typename C>
void Score(const Job<T, C>& job) {
  constexpr int64_t kChunk = Packing<C>::kChunk;
  for (int64_t chunk = 0; chunk < job.num_tokens; chunk += kChunk) {
    for (int64_t head = 0; head < job.num_heads; ++head) {
      const Heads k = job.ChunkOfK(head, chunk);
      const bool is_last = chunk + kChunk == job.num_tokens;
      const Heads heads = is_last ? job.At(job.v, head, 0) : job.At(job.k, head, chunk + kChunk);
      InBlocks(job.num_rows, kDotRows, [&](int64_t row, int64_t count) {
        if (!job.Sees(row, count, chunk, kChunk)) return;
        const int64_t first = std::max<int64_t>(job.begin(row) - chunk, 0) / kLanes * kLanes;
        const int64_t end = std::min(job.ends[row + count - 1] - chunk, kChunk);
        const NextHeads next{heads, row == 0 ? job.call.head_bytes() : 0};
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

// exp(x) for x <= 0: 2^n exp(r) with |r| <= ln(2) / 2, and exp(r) by its series to r^6, coefficients fitted (Cephes).
inline F32 Exp(F32 x) {
  x = x > -87.0f ? x : Splat(-87.0f);
  // From 2^23 on float32 numbers are whole: the first sum is rounded, and has n in its lowest bits.
  const F32 shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
  const F32 r = x - n * 0.693359375f + n * 2.12194440e-4f;
  F32 p = Splat(1.9875691500e-4f);
  for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    p = p * r + c;
  }
  p = p * r * r + (r + 1.0f);
  return p * (F32)(((Words)shifted << 23) + 0x3f800000u);
}

// f of all lanes: each meets the one half a register on, so that it does not matter in which the first token is.
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

// weights = exp(scale * (weights - the largest)) for the tokens [begin, end), 0 for others. Returns their sum.
inline float Soften(float* weights, int64_t num_tokens, int32_t begin, int32_t end, float scale) {
  I32 lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  const F32 lowest = Splat(-std::numeric_limits<float>::infinity());
  F32 largest = lowest, sum = {};
  for (int64_t first = 0; first < num_tokens; first += kLanes) {
    const I32 token = lane + static_cast<int32_t>(first);
    const F32 score = token >= begin & token < end ? Load<F32>(weights + first) * scale : lowest;
    largest = score > largest ? score : largest;
  }
  const float top = Across(largest, [](float a, float b) { return a > b ? a : b; });
  for (int64_t first = 0; first < num_tokens; first += kLanes) {
    const I32 token = lane + static_cast<int32_t>(first);
    const F32 weight = token >= begin & token < end ? Exp(Load<F32>(weights + first) * scale - top) : F32{};
    sum += weight;
    Store(weights + first, weight);
  }
  return Across(sum, [](float a, float b) { return a + b; });
}

// sums += weights @ V for kRows rows, the tokens [first, end) of a chunk and kGroups groups of columns, which begin at
// so many bytes.
template <typename C, int kRows, int kGroups>
[[gnu::noinline]] void AddValues(const float* weights, int64_t stride, Heads v, const int64_t* group_bytes,
                                 int64_t first, int64_t end, NextHeads next, float* sums, int64_t sums_stride) {
  constexpr int kVectors = kGroups * kSumVectors, kStep = kNumRegisters == 32 ? kSumVectors : 2;
  F32 sum[kRows][kVectors];
  UNROLL
  for (int row = 0; row < kRows; ++row) {
    UNROLL
    for (int i = 0; i < kVectors; ++i) sum[row][i] = Load<F32>(sums + row * sums_stride + i * kLanes);
  }
  for (int64_t t = first; t < end; ++t) {
    next.Ask(t);
    const char* head = v[t];
    UNROLL
    for (int i = 0; i < kVectors; i += kStep) {
      F32 columns[kStep];
      UNROLL
      for (int j = 0; j < kStep; ++j) {
        const int at = (i + j) % kSumVectors;
        const char* words = head + group_bytes[i / kSumVectors] + at / C::kValues * C::kBytes;
        columns[j] = C::Number(C::Read(words), at % C::kValues);
      }
      const float* its = weights + t;
      Forget(its);
      UNROLL
      for (int row = 0; row < kRows; ++row) {
        UNROLL
        for (int j = 0; j < kStep; ++j) sum[row][i + j] += its[row * stride] * columns[j];
      }
    }
  }
  UNROLL
  for (int row = 0; row < kRows; ++row) {
    UNROLL
    for (int i = 0; i < kVectors; ++i) Store(sums + row * sums_stride + i * kLanes, sum[row][i]);
  }
}

// sums = weights @ V, some tokens at a time, which meanwhile stay in the first-level cache.
template <typename T, typename C>
void Gather(const Job<T, C>& job) {
  constexpr int64_t kChunk = Packing<C>::kChunk;
  const int64_t stride = job.num_groups * kGroup;
  std::fill_n(job.sums, job.num_heads * job.num_rows * stride, 0.0f);
  for (int64_t chunk = 0; chunk < job.num_tokens; chunk += kChunk) {
    for (int64_t head = 0; head < job.num_heads; ++head) {
      const Heads v = job.ChunkOfV(head, chunk);
      const bool is_last = chunk + kChunk == job.num_tokens;
      InBlocks(job.num_rows, kSumRows, [&](int64_t row, int64_t count) {
        if (!job.Sees(row, count, chunk, kChunk)) return;
        const int64_t first = std::max<int64_t>(job.begin(row) - chunk, 0);
        const int64_t end = std::min(job.ends[row + count - 1] - chunk, kChunk);
        float* sums = job.sums + job.index(head, row) * stride;
        const float* weights = job.weight(head, row) + chunk;
        WithConstant<kSumRows>(count, [&](auto rows) {
          const auto add = [&](int64_t group, auto groups) {
            int64_t group_bytes[groups];
            for (int i = 0; i < groups; ++i) group_bytes[i] = job.column(group + i) * sizeof(typename C::Value);
            const bool asks = row == 0 && group == 0 && !is_last;
            const NextHeads next{job.At(job.v, head, chunk + kChunk), asks ? job.call.head_bytes() : 0};
            AddValues<C, rows, groups>(weights, job.num_tokens, v, group_bytes, first, end, next,
                                       sums + group * kGroup, stride);
          };
          int64_t group = 0;
          for (; group + SumGroups(rows) <= job.num_groups; group += SumGroups(rows)) {
            add(group, std::integral_constant<int, SumGroups(rows)>());
          }
          for (; group < job.num_groups; ++group) add(group, std::integral_constant<int, 1>());
        });
      });
    }
  }
}

// out = sums / totals.
template <typename T, typename C>
void Finish(const Job<T, C>& job) {
  for (int64_t i = 0; i < job.num_heads * job.num_rows; ++i) {
    const float share = 1.0f / job.totals[i];
    for (int64_t group = 0; group < job.num_groups; ++group) {
      const float* sums = job.sums + (i * job.num_groups + group) * kGroup;
      typename T::Value columns[kGroup];
      if constexpr (std::is_same_v<T, C>) {
        for (int v = 0; v < kSumVectors; v += T::kValues) {
          F32 numbers[T::kValues];
          for (int j = 0; j < T::kValues; ++j) numbers[j] = Load<F32>(sums + (v + j) * kLanes) * share;
          Store(columns + v * kLanes, T::Narrow(numbers));
        }
      } else {
        for (int64_t column = 0; column < kGroup; ++column) columns[column] = T::FromFloat(sums[column] * share);
      }
      std::copy_n(columns, std::min(kGroup, job.call.head_dim), job.call.out + job.places[i] + job.column(group));
    }
  }
}

// weights *= the scales of the tokens' K or V, for all rows of a head, of which `scales` has the first.
template <typename T, typename C>
void Rescale(const Job<T, C>& job, const float* scales, int64_t head) {
  for (int64_t token = 0; token < job.num_tokens; token += kLanes) {
    F32 factors;
    for (int i = 0; i < kLanes; ++i) factors[i] = scales[job.scale_offsets[token + i]];
    for (int64_t row = 0; row < job.num_rows; ++row) {
      float* weights = job.weight(head, row) + token;
      Store(weights, Load<F32>(weights) * factors);
    }
  }
}

// The queries of one tile, with the kv heads [first_head, first_head + num_heads).
template <typename T, typename C>
void Attend(const AttentionCall<T, C>& call, int64_t tile, int64_t first_head, int64_t num_heads) {
  using Value = typename T::Value;
  const int64_t start = call.query_starts[tile], end = std::min<int64_t>(start + call.tile_len, call.seq_lens[tile]);
  // Padding: queries at or beyond the sequence's end, all of them if it has no tokens.
  const int64_t num_queries = start < 0 ? 0 : std::max<int64_t>(end - start, 0);
  const int64_t group = call.num_q_heads / call.num_kv_heads;
  const auto place = [&](int64_t query, int64_t head) {
    return ((tile * call.tile_len + query) * call.num_q_heads + head) * call.head_dim;
  };
  for (int64_t query = num_queries; query < call.tile_len; ++query) {
    std::fill_n(call.out + place(query, first_head * group), num_heads * group * call.head_dim, Value{0});
  }
  if (num_queries == 0) return;

  constexpr int64_t kChunk = Packing<C>::kChunk, kAlignment = Packing<C>::kAlignment;
  const int64_t begin = std::max<int64_t>(start + 1 - call.window, 0) / kAlignment * kAlignment;
  const int64_t num_tokens = (end - begin + kChunk - 1) / kChunk * kChunk;
  const int64_t num_rows = num_queries * group, num_places = num_heads * num_rows;
  const int64_t width = std::max(call.head_dim, kGroup), num_groups = (width + kGroup - 1) / kGroup;
  const int64_t width_bytes = width * sizeof(typename C::Value);
  const bool has_offsets = Packing<C>::kIsPacked || call.k_scales;
  const int64_t num_factors = (width_bytes + C::kBytes - 1) / C::kBytes * kLanes * C::kFactors;
  thread_local Scratch<int64_t> offsets, scale_offsets, ends, places;
  thread_local Scratch<uint32_t> factors;
  thread_local Scratch<float> weights, totals, sums;
  thread_local Scratch<char> copy;
  const Job<T, C> job{call, first_head, num_heads, num_rows, num_tokens, width, num_groups, num_factors,
                      call.k + first_head * call.strides.head, call.v + first_head * call.strides.head,
                      offsets.Get(num_tokens + kChunk), scale_offsets.Get(has_offsets ? num_tokens : 0),
                      ends.Get(num_rows), places.Get(num_places), factors.Get(num_places * num_factors),
                      weights.Get(num_places * num_tokens), totals.Get(num_places),
                      sums.Get(num_places * num_groups * kGroup), copy.Get(kChunk * width_bytes)};

  const int32_t* const table = call.TableOf(tile);
  for (int64_t position = begin; position < end;) {
    const int64_t block = position / call.block_size, block_end = std::min((block + 1) * call.block_size, end);
    const int64_t block_id = call.first_block + table[block] * call.block_stride;
    for (; position < block_end; ++position) {
      const int64_t offset = position - block * call.block_size;
      job.offsets[position - begin] = call.strides.At(block_id, offset);
      if (has_offsets) job.scale_offsets[position - begin] = call.scale_strides.At(block_id, offset);
    }
  }
  // Up to a whole chunk the last token is read again, with no weight: behind it the cache may end.
  std::fill(job.offsets + (end - begin), job.offsets + num_tokens, job.offsets[end - begin - 1]);
  if (has_offsets) {
    int64_t* last = job.scale_offsets + (end - begin - 1);
    std::fill(last + 1, job.scale_offsets + num_tokens, *last);
  }
  for (int64_t i = 0; i < kChunk; ++i) job.offsets[num_tokens + i] = i * width_bytes;
  if (width > call.head_dim) std::memset(job.copy, 0, kChunk * width_bytes);

  for (int64_t row = 0; row < num_rows; ++row) job.ends[row] = start + row / group + 1 - begin;
  for (int64_t head = 0; head < num_heads; ++head) {
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t i = job.index(head, row);
      job.places[i] = place(row / group, (first_head + head) * group + row % group);
      Spread<T, C>(call.q + job.places[i], call.head_dim, width, job.factors + i * num_factors);
    }
  }
  Score(job);
  for (int64_t head = 0; head < num_heads; ++head) {
    const int64_t its = (first_head + head) * call.scale_strides.head;
    if (call.k_scales) Rescale(job, call.k_scales + its, head);
    for (int64_t row = 0; row < num_rows; ++row) {
      job.totals[job.index(head, row)] =
          Soften(job.weight(head, row), num_tokens, job.begin(row), job.ends[row], call.scale);
    }
    if (call.v_scales) Rescale(job, call.v_scales + its, head);
  }
  Gather(job);
  Finish(job);
}

template <typename T, typename C, typename Pool>
void AttendAll(Pool& pool, const AttentionCall<T, C>& call) {
  // All kv heads at once read K and V as they lie in memory; one by one they occupy more threads.
  const int64_t num_heads = call.num_tiles < 2 * pool.num_threads() ? 1 : call.num_kv_heads;
  const int64_t parts = call.num_kv_heads / num_heads;
  Share(pool, call.num_tiles * parts, [=](int64_t item, int64_t) {
    Attend(call, item / parts, item % parts * num_heads, num_heads);
  });
}

}  // namespace native

#endif  // PALLAS_KERNELS_NATIVE_ATTENTION_H_
