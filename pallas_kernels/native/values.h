// Sums of V's numbers by weights: weights @ V, and the softmax's division.

#ifndef PALLAS_KERNELS_NATIVE_VALUES_H_
#define PALLAS_KERNELS_NATIVE_VALUES_H_

#include "attention_job.h"

namespace native {

// The rows and the groups of V's columns that are multiplied at once. Sums stay in registers, and there are enough of
// them to hide the latency of an addition.
constexpr int kSumRows = kNumRegisters == 32 ? 4 : kLanes == 8 ? 6 : 3;
constexpr int SumGroups(int rows) { return std::clamp(12 / (rows * kSumVectors), 1, 4); }

// Adds weights @ V to sums, for kRows rows, the tokens [first, end) of a chunk, and kGroups groups of columns, which
// begin at these bytes of a token.
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
  int64_t t = first;
  do {  // at least one: a loop that may have none makes GCC keep two copies of the sums
    next.Ask();
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
  } while (++t < end);
  UNROLL
  for (int row = 0; row < kRows; ++row) {
    UNROLL
    for (int i = 0; i < kVectors; ++i) Store(sums + row * sums_stride + i * kLanes, sum[row][i]);
  }
}

// Adds weights @ V to sums for few rows, from V as it lies.
template <typename T, typename C>
void GatherFew(const Job<T, C>& job) {
  constexpr int64_t kChunk = Packing<C>::kChunk;
  const int64_t stride = job.num_groups * kGroup;
  for (int64_t chunk = 0; chunk < job.num_tokens; chunk += kChunk) {
    for (int64_t head = 0; head < job.num_heads; ++head) {
      const Heads v = job.ChunkOfV(head, chunk);
      InBlocks(job.num_rows, kSumRows, [&](int64_t row, int64_t count) {
        if (!job.Sees(row, count, chunk, kChunk)) return;
        const int64_t first = std::max<int64_t>(job.begin(row) - chunk, 0);
        const int64_t end = std::min(job.end(row + count - 1) - chunk, kChunk);
        float* sums = job.sums + job.index(head, row) * stride;
        const float* weights = job.weight(head, row) + chunk;
        WithConstant<kSumRows>(count, [&](auto rows) {
          const int64_t num_calls = job.num_groups / SumGroups(rows) + job.num_groups % SumGroups(rows);
          int64_t call = 0;
          const auto add = [&](int64_t group, auto groups) {
            int64_t group_bytes[groups];
            for (int i = 0; i < groups; ++i) group_bytes[i] = job.column(group + i) * sizeof(typename C::Value);
            const NextHeads next =
                row > 0 ? NextHeads{} : job.AfterV(head, chunk + kChunk, kChunk, call++, num_calls);
            AddValues<C, rows, groups>(weights, job.stride, v, group_bytes, first, end, next, sums + group * kGroup,
                                       stride);
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

// Widens a chunk of V, with groups of columns `panel` numbers apart; columns of a group are in the order of widening.
template <typename C, typename T>
void WidenValues(const Job<T, C>& job, Heads v, float* numbers, int64_t panel) {
  for (int64_t t = 0; t < Packing<C>::kChunk; ++t) {
    const char* head = v[t];
    for (int64_t group = 0; group < job.num_groups; ++group) {
      const char* words = head + job.column(group) * sizeof(typename C::Value);
      float* its = numbers + group * panel + t * kGroup;
      UNROLL
      for (int i = 0; i < kSumVectors; ++i) {
        Store(its + i * kLanes, C::Number(C::Read(words + i / C::kValues * C::kBytes), i % C::kValues));
      }
    }
  }
}

// Adds weights @ V to sums for many rows: V is widened once for all of them, in groups of columns of a few tokens,
// which stay in the first-level cache.
template <typename T, typename C>
void GatherMany(const Job<T, C>& job) {
  constexpr int64_t kChunk = Packing<C>::kChunk, kSome = 64;
  static_assert(kSome % kChunk == 0);
  const int64_t stride = job.num_groups * kGroup, no_bytes = 0;
  thread_local Scratch<float> scratch;
  float* panels = scratch.Get(job.num_groups * kSome * kGroup);  // [groups, kSome, kGroup]
  int64_t offsets[kSome];
  for (int64_t t = 0; t < kSome; ++t) offsets[t] = t * kGroup * sizeof(float);
  for (int64_t chunk = 0; chunk < job.num_tokens; chunk += kSome) {
    const int64_t num_tokens = std::min(kSome, job.num_tokens - chunk);
    const int64_t num_left = job.num_tokens - chunk - num_tokens;
    const int64_t num_next = num_left > 0 ? std::min(kSome, num_left) : job.num_after_v;
    for (int64_t head = 0; head < job.num_heads; ++head) {
      for (int64_t t = 0; t < num_tokens; t += kChunk) {
        WidenValues<C>(job, job.ChunkOfV(head, chunk + t), panels + t * kGroup, kSome * kGroup);
      }
      NextHeads next = job.AfterV(head, chunk + num_tokens, num_next);
      const int64_t num_blocks = (job.num_rows + kSumRows - 1) / kSumRows;
      int64_t block = 0;
      InBlocks(job.num_rows, kSumRows, [&](int64_t row, int64_t count) {
        next.AskPart(block++, num_blocks, num_next);
        if (!job.Sees(row, count, chunk, num_tokens)) return;
        const int64_t first = std::max<int64_t>(job.begin(row) - chunk, 0);
        const int64_t end = std::min(job.end(row + count - 1) - chunk, num_tokens);
        float* sums = job.sums + job.index(head, row) * stride;
        const float* weights = job.weight(head, row) + chunk;
        WithConstant<kSumRows>(count, [&](auto rows) {
          for (int64_t group = 0; group < job.num_groups; ++group) {
            const Heads v{reinterpret_cast<const char*>(panels + group * kSome * kGroup), offsets};
            AddValues<Float32, rows, 1>(weights, job.stride, v, &no_bytes, first, end, {}, sums + group * kGroup,
                                        stride);
          }
        });
      });
    }
  }
}

// Adds weights @ V to sums, a chunk of tokens at a time, which stays in the first-level cache.
template <typename T, typename C>
void Gather(const Job<T, C>& job) {
  if (job.num_rows >= 2 * kSumRows) {
    GatherMany(job);
  } else {
    GatherFew(job);
  }
}

// Writes out = sums / totals.
template <typename T, typename C>
void Finish(const Job<T, C>& job) {
  for (int64_t i = 0; i < job.num_heads * job.num_rows; ++i) {
    const float share = 1.0f / job.totals[i];
    for (int64_t group = 0; group < job.num_groups; ++group) {
      const float* sums = job.sums + (i * job.num_groups + group) * kGroup;
      typename T::Value columns[kGroup], *out = job.call.out + job.places[i] + job.column(group);
      typename T::Value* its = job.call.head_dim < kGroup ? columns : out;
      if constexpr (std::is_same_v<T, C> || T::kValues == 1) {
        for (int v = 0; v < kSumVectors; v += T::kValues) {
          F32 numbers[T::kValues];
          for (int j = 0; j < T::kValues; ++j) numbers[j] = Load<F32>(sums + (v + j) * kLanes) * share;
          Store(its + v * kLanes, T::Narrow(numbers));
        }
      } else {
        for (int64_t column = 0; column < kGroup; ++column) its[column] = T::FromFloat(sums[column] * share);
      }
      if (its == columns) std::copy_n(columns, job.call.head_dim, out);
    }
  }
}

}  // namespace native

#endif  // PALLAS_KERNELS_NATIVE_VALUES_H_
