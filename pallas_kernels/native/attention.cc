// Causal attention of tiles of query tokens over paged K and V: `ops.tiled_paged_attention` for CPUs with AVX-512.
//
// K and V are read where they lie, once for the query heads that share them, and as far as a query sees: time follows
// the tokens that live, and nothing is gathered. Sums are in float32, and so are the softmax's weights. A query's bits
// depend on its own tokens alone.

#include <limits>
#include <vector>

#include "common.h"

namespace {

using namespace native;

constexpr int64_t kMaxRows = 4;     // rows of queries whose outputs are summed in one pass over V
constexpr int64_t kMaxVectors = 4;  // registers of an output that are

struct Shape {
  int64_t num_tiles, tile_len, num_q_heads, head_dim, num_kv_heads, block_size, max_blocks;
  int64_t group() const { return num_q_heads / num_kv_heads; }
};

// [sums of neighbours in a, sums of neighbours in b]
inline __m512 PairSums(__m512 a, __m512 b) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  return _mm512_add_ps(_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b));
}

// exp(x) for x <= 0: 2^n exp(r) with |r| <= ln(2) / 2, and exp(r) by its series to r^6, coefficients fitted (Cephes).
inline __m512 Exp(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-87.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  }
  p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

// One tile and some of its kv heads: the rows of queries that share each of these, and the tokens that some row sees.
// A row is one head of one token: row r belongs to token r / group of the tile.
template <typename T>
struct Job {
  using Value = typename T::Value;
  const Value *q, *k, *v;  // of the first of the kv heads
  Value* out;
  int64_t num_kv_heads, num_rows, group;
  int64_t token_stride;  // from one token's queries to the next one's
  int64_t head_dim, start, window;
  int64_t begin, end;        // positions [begin, end) are seen by some row
  const int64_t* offsets;    // where K and V of position begin + i lie; whole registers of them
  float *weights, *outputs;  // [num_kv_heads, num_rows, stride], [num_kv_heads, num_rows, head_dim]
  int64_t stride;

  int64_t place(int64_t head, int64_t row) const {
    return row / group * token_stride + (head * group + row % group) * head_dim;
  }
  float* weight(int64_t head, int64_t row) const { return weights + (head * num_rows + row) * stride; }
  float* output(int64_t head, int64_t row) const { return outputs + (head * num_rows + row) * head_dim; }
  int64_t first_seen(int64_t row) const { return std::max<int64_t>(start + row / group + 1 - window, 0); }
  int64_t end_seen(int64_t row) const { return start + row / group + 1; }
  // Which of the 16 tokens from begin + first on a row sees.
  __mmask16 Seen(int64_t row, int64_t first) const {
    const uint32_t before_end = Existing(begin + first, end_seen(row), kLanes);
    const uint32_t before_window = Existing(begin + first, first_seen(row), kLanes);
    return static_cast<__mmask16>(before_end & ~before_window);
  }
};

// Asks for a head of K or V of one token, into the second-level cache: the first is too small for what is in use and
// what comes next. Never for many at once: the processor would wait, and they are to arrive while it computes.
template <typename Value>
void Prefetch(const Value* p, int64_t head_dim) {
  const char* bytes = reinterpret_cast<const char*>(p);
  for (int64_t line = 0; line < head_dim * int64_t{sizeof(Value)}; line += kCacheLine) {
    _mm_prefetch(bytes + line, _MM_HINT_T1);
  }
}

// sums[i] = partial sums of q.k for 16 tokens, for `kVectors` whole registers of head_dim.
template <typename T, int kVectors>
void DotWhole(const typename T::Value* q, const typename T::Value* k, const int64_t* offsets, __m512 sums[kLanes]) {
  __m512 query[kVectors];
#pragma GCC unroll 8
  for (int d = 0; d < kVectors; ++d) query[d] = T::Pairs(q + d * T::kPairLanes, ~0u);
#pragma GCC unroll 16
  for (int64_t i = 0; i < kLanes; ++i) {
    const typename T::Value* token = k + offsets[i];
    sums[i] = _mm512_setzero_ps();
#pragma GCC unroll 8
    for (int d = 0; d < kVectors; ++d) {
      sums[i] = T::AddProduct(sums[i], query[d], T::Pairs(token + d * T::kPairLanes, ~0u));
    }
  }
}

template <typename T>
void Dot(const typename T::Value* q, const typename T::Value* k, const int64_t* offsets, int64_t head_dim,
         __m512 sums[kLanes]) {
  if (head_dim == T::kPairLanes) return DotWhole<T, 1>(q, k, offsets, sums);
  if (head_dim == 2 * T::kPairLanes) return DotWhole<T, 2>(q, k, offsets, sums);
  if (head_dim == 4 * T::kPairLanes) return DotWhole<T, 4>(q, k, offsets, sums);
  if (head_dim == 8 * T::kPairLanes) return DotWhole<T, 8>(q, k, offsets, sums);
  for (int64_t i = 0; i < kLanes; ++i) sums[i] = _mm512_setzero_ps();
  for (int64_t d = 0; d < head_dim; d += T::kPairLanes) {
    const uint32_t mask = Existing(d, head_dim, T::kPairLanes);
    const __m512 query = T::Pairs(q + d, mask);
    for (int64_t i = 0; i < kLanes; ++i) {
      sums[i] = T::AddProduct(sums[i], query, T::Pairs(k + offsets[i] + d, mask));
    }
  }
}

// weights = q.k for all rows and tokens, 16 tokens at a time, which meanwhile stay in the first-level cache.
template <typename T>
void Score(const Job<T>& job) {
  for (int64_t first = 0; first < job.stride; first += kLanes) {
    const int64_t* here = job.offsets + first;
    for (int64_t head = 0; head < job.num_kv_heads; ++head) {
      const typename T::Value* k = job.k + head * job.head_dim;
      for (int64_t row = 0; row < job.num_rows; ++row) {
        if (first + kLanes < job.stride) {  // each row its share of the next 16 tokens
          for (int64_t i = kLanes * row / job.num_rows; i < kLanes * (row + 1) / job.num_rows; ++i) {
            Prefetch(k + here[kLanes + i], job.head_dim);
          }
        }
        if (!job.Seen(row, first)) continue;
        __m512 sums[kLanes];
        Dot<T>(job.q + job.place(head, row), k, here, job.head_dim, sums);
#pragma GCC unroll 4
        for (int width = kLanes; width > 1; width /= 2) {
#pragma GCC unroll 8
          for (int i = 0; i < width / 2; ++i) sums[i] = PairSums(sums[2 * i], sums[2 * i + 1]);
        }
        _mm512_storeu_ps(job.weight(head, row) + first, sums[0]);
      }
    }
  }
}

// weights = the softmax of scale * weights over what the row sees, 0 elsewhere.
template <typename T>
void Soften(const Job<T>& job, int64_t row, float* weights, float scale) {
  const __m512 lowest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __m512 largest = lowest;
  for (int64_t first = 0; first < job.stride; first += kLanes) {
    const __m512 scores = _mm512_mul_ps(_mm512_loadu_ps(weights + first), _mm512_set1_ps(scale));
    largest = _mm512_max_ps(largest, _mm512_mask_mov_ps(lowest, job.Seen(row, first), scores));
  }
  const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
  __m512 sum = _mm512_setzero_ps();
  for (int64_t first = 0; first < job.stride; first += kLanes) {
    const __m512 scores = _mm512_mul_ps(_mm512_loadu_ps(weights + first), _mm512_set1_ps(scale));
    const __m512 weight = _mm512_maskz_mov_ps(job.Seen(row, first), Exp(_mm512_sub_ps(scores, top)));
    sum = _mm512_add_ps(sum, weight);
    _mm512_storeu_ps(weights + first, weight);
  }
  const __m512 share = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(sum));
  for (int64_t first = 0; first < job.stride; first += kLanes) {
    _mm512_storeu_ps(weights + first, _mm512_mul_ps(_mm512_loadu_ps(weights + first), share));
  }
}

constexpr int64_t kTokens = 32;  // of V, that stay in the first-level cache for all rows

// outputs += weights @ V for `kRows` rows and the tokens [first, end).
template <typename T, int kRows>
void AddValues(const Job<T>& job, int64_t head, int64_t row, int64_t first, int64_t end) {
  const float* weights = job.weight(head, row);
  for (int64_t d = 0; d < job.head_dim; d += kMaxVectors * kLanes) {
    const typename T::Value* v = job.v + head * job.head_dim + d;
    float* outputs = job.output(head, row) + d;
    uint32_t masks[kMaxVectors];
    for (int64_t i = 0; i < kMaxVectors; ++i) masks[i] = Existing(d + i * kLanes, job.head_dim, kLanes);
    const bool is_whole = masks[kMaxVectors - 1] == Existing(0, kLanes, kLanes);
    __m512 total[kRows][kMaxVectors];
    for (int r = 0; r < kRows; ++r) {
      for (int64_t i = 0; i < kMaxVectors; ++i) {
        total[r][i] = Float32::Widen(outputs + r * job.head_dim + i * kLanes, masks[i]);
      }
    }
    for (int64_t t = first; t < end; ++t) {
      if (row == 0 && t + kTokens < job.stride) {
        Prefetch(v + job.offsets[t + kTokens], std::min(kMaxVectors * kLanes, job.head_dim - d));
      }
      const auto add = [&](int64_t i, uint32_t mask) {
        const __m512 values = T::Widen(v + job.offsets[t] + i * kLanes, mask);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          total[r][i] = _mm512_fmadd_ps(_mm512_set1_ps(weights[r * job.stride + t]), values, total[r][i]);
        }
      };
      if (is_whole) {
#pragma GCC unroll 4
        for (int64_t i = 0; i < kMaxVectors; ++i) add(i, ~0u);
      } else {
#pragma GCC unroll 4
        for (int64_t i = 0; i < kMaxVectors; ++i) add(i, masks[i]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int64_t i = 0; i < kMaxVectors; ++i) {
        Float32::Store(outputs + r * job.head_dim + i * kLanes, masks[i], total[r][i]);
      }
    }
  }
}

// outputs = weights @ V, a few tokens at a time, which meanwhile stay in the first-level cache.
template <typename T>
void Gather(const Job<T>& job) {
  std::fill_n(job.outputs, job.num_kv_heads * job.num_rows * job.head_dim, 0.0f);
  for (int64_t chunk = 0; chunk < job.end - job.begin; chunk += kTokens) {
    for (int64_t head = 0; head < job.num_kv_heads; ++head) {
      for (int64_t row = 0; row < job.num_rows; row += kMaxRows) {
        const int64_t count = std::min(job.num_rows - row, kMaxRows);
        const int64_t first = std::max(chunk, job.first_seen(row) - job.begin);
        const int64_t end = std::min(chunk + kTokens, job.end_seen(row + count - 1) - job.begin);
        if (first >= end) continue;
        switch (count) {
          case 1: AddValues<T, 1>(job, head, row, first, end); break;
          case 2: AddValues<T, 2>(job, head, row, first, end); break;
          case 3: AddValues<T, 3>(job, head, row, first, end); break;
          default: AddValues<T, 4>(job, head, row, first, end);
        }
      }
    }
  }
}

template <typename T>
struct Arrays {
  const typename T::Value *q, *k, *v;
  const int32_t *block_tables, *query_starts, *seq_lens;
  typename T::Value* out;
};

// The queries of one tile, with the kv heads [first_head, first_head + num_heads).
template <typename T>
void Attend(const Arrays<T>& arrays, const Shape& shape, int64_t tile, int64_t first_head, int64_t num_heads,
            float scale, int64_t window) {
  using Value = typename T::Value;
  const int64_t group = shape.group(), head_dim = shape.head_dim, token_stride = shape.num_q_heads * head_dim;
  const int64_t start = arrays.query_starts[tile];
  const int64_t end = std::min<int64_t>(start + shape.tile_len, arrays.seq_lens[tile]);
  const int64_t begin = std::max<int64_t>(start + 1 - window, 0);
  // Padding: queries at or beyond the sequence's end, all of them if it has no tokens.
  const int64_t num_queries = start < 0 ? 0 : std::max<int64_t>(end - start, 0);
  const int64_t origin = tile * shape.tile_len * token_stride + first_head * group * head_dim;
  for (int64_t i = num_queries; i < shape.tile_len; ++i) {
    std::fill_n(arrays.out + origin + i * token_stride, num_heads * group * head_dim, Value{0});
  }
  if (num_queries == 0) return;

  thread_local std::vector<int64_t> offsets;
  thread_local std::vector<float> weights, outputs;
  const int64_t num_rows = num_queries * group, stride = (end - begin + kLanes - 1) / kLanes * kLanes;
  offsets.resize(stride);
  weights.resize(num_heads * num_rows * stride);
  outputs.resize(num_heads * num_rows * head_dim);
  const int32_t* blocks = arrays.block_tables + tile * shape.max_blocks;
  for (int64_t position = begin; position < end;) {
    const int64_t block = position / shape.block_size;
    int64_t slot = blocks[block] * shape.block_size + position % shape.block_size;
    for (; position < std::min((block + 1) * shape.block_size, end); ++position, ++slot) {
      offsets[position - begin] = (slot * shape.num_kv_heads + first_head) * head_dim;
    }
  }
  std::fill(offsets.begin() + (end - begin), offsets.end(), offsets[end - begin - 1]);
  const Job<T> job{arrays.q + origin, arrays.k, arrays.v, arrays.out + origin, num_heads, num_rows, group,
                   token_stride, head_dim, start, window, begin, end, offsets.data(), weights.data(), outputs.data(),
                   stride};
  Score(job);
  for (int64_t head = 0; head < num_heads; ++head) {
    for (int64_t row = 0; row < num_rows; ++row) Soften(job, row, job.weight(head, row), scale);
  }
  Gather(job);
  for (int64_t head = 0; head < num_heads; ++head) {
    for (int64_t row = 0; row < num_rows; ++row) {
      for (int64_t d = 0; d < head_dim; d += kLanes) {
        const uint32_t mask = Existing(d, head_dim, kLanes);
        T::Store(job.out + job.place(head, row) + d, mask, Float32::Widen(job.output(head, row) + d, mask));
      }
    }
  }
}

template <typename T>
void AttendAll(ffi::ThreadPool pool, const Shape& shape, const Arrays<T>& arrays, float scale, int64_t window) {
  // All kv heads at once read K and V as they lie in memory; one by one they occupy more threads.
  const int64_t num_heads = shape.num_tiles < 2 * pool.num_threads() ? 1 : shape.num_kv_heads;
  const int64_t parts = shape.num_kv_heads / num_heads;
  Share(pool, shape.num_tiles * parts, [=](int64_t item, int64_t) {
    Attend<T>(arrays, shape, item / parts, item % parts * num_heads, num_heads, scale, window);
  });
}

ffi::Error Attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                     ffi::Buffer<ffi::S32> block_tables, ffi::Buffer<ffi::S32> query_starts,
                     ffi::Buffer<ffi::S32> seq_lens, ffi::Result<ffi::AnyBuffer> out, float scale, int64_t window) {
  const auto queries = q.dimensions(), cache = k.dimensions();
  const Shape shape{queries[0], queries[1], queries[2], queries[3], cache[2], cache[1], block_tables.dimensions()[1]};
  const auto attend = [&](auto type) {
    using T = decltype(type);
    using Value = typename T::Value;
    const auto values = [](const ffi::AnyBuffer& buffer) { return static_cast<const Value*>(buffer.untyped_data()); };
    const Arrays<T> arrays{values(q), values(k), values(v), block_tables.typed_data(), query_starts.typed_data(),
                           seq_lens.typed_data(), static_cast<Value*>(out->untyped_data())};
    AttendAll(pool, shape, arrays, scale, window);
    return ffi::Error::Success();
  };
  if (q.element_type() == ffi::F32) return attend(Float32());
#ifdef __AVX512BF16__
  if (q.element_type() == ffi::BF16) return attend(BFloat16());
#endif
  return ffi::Error::InvalidArgument("q must be float32, or bfloat16 with AVX512_BF16");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpaged_attention, Attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window"));
