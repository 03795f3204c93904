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

constexpr int64_t kMaxHeads = 4;    // query heads whose outputs are summed in one pass over V
constexpr int64_t kMaxVectors = 4;  // registers of an output that are, too

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

// weights[t] = exp(scale * q.k[t] - largest) for `count` tokens, zeros up to a whole register; returns their sum.
template <typename T>
float Weigh(const typename T::Value* q, const typename T::Value* k, const int64_t* offsets, int64_t count,
            int64_t head_dim, float scale, float* weights) {
  const __m512 lowest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __m512 largest = lowest;
  for (int64_t first = 0; first < count; first += kLanes) {
    const typename T::Value* tokens[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) {
      tokens[i] = k + offsets[std::min(first + i, count - 1)];
      const char* ahead = reinterpret_cast<const char*>(k + offsets[std::min(first + i + kLanes, count - 1)]);
      for (int64_t line = 0; line < head_dim * int64_t{sizeof(*k)}; line += kCacheLine) {
        _mm_prefetch(ahead + line, _MM_HINT_T0);
      }
    }
    __m512 sums[kLanes];
    for (__m512& sum : sums) sum = _mm512_setzero_ps();
    for (int64_t d = 0; d < head_dim; d += T::kPairLanes) {
      const uint32_t mask = Existing(d, head_dim, T::kPairLanes);
      const __m512 query = T::Pairs(q + d, mask);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i) sums[i] = T::AddProduct(sums[i], query, T::Pairs(tokens[i] + d, mask));
    }
#pragma GCC unroll 4
    for (int width = kLanes; width > 1; width /= 2) {
#pragma GCC unroll 8
      for (int i = 0; i < width / 2; ++i) sums[i] = PairSums(sums[2 * i], sums[2 * i + 1]);
    }
    const __mmask16 exist = static_cast<__mmask16>(Existing(first, count, kLanes));
    const __m512 scores = _mm512_mask_mul_ps(lowest, exist, sums[0], _mm512_set1_ps(scale));
    largest = _mm512_max_ps(largest, scores);
    _mm512_storeu_ps(weights + first, scores);
  }
  const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
  __m512 sum = _mm512_setzero_ps();
  for (int64_t first = 0; first < count; first += kLanes) {
    const __mmask16 exist = static_cast<__mmask16>(Existing(first, count, kLanes));
    const __m512 scores = _mm512_loadu_ps(weights + first);
    const __m512 weight = _mm512_maskz_mov_ps(exist, Exp(_mm512_sub_ps(scores, top)));
    sum = _mm512_add_ps(sum, weight);
    _mm512_storeu_ps(weights + first, weight);
  }
  return _mm512_reduce_add_ps(sum);
}

// out[head] = sum over tokens of weights[head][t] * v[t] / sums[head], `kHeads` heads in one pass over V.
template <typename T, int kHeads>
void Gather(const typename T::Value* v, const int64_t* offsets, int64_t count, int64_t head_dim, const float* weights,
            int64_t stride, const float* sums, typename T::Value* out) {
  for (int64_t d = 0; d < head_dim; d += kMaxVectors * kLanes) {
    uint32_t masks[kMaxVectors];
    for (int64_t i = 0; i < kMaxVectors; ++i) masks[i] = Existing(d + i * kLanes, head_dim, kLanes);
    __m512 total[kHeads][kMaxVectors];
    for (auto& vectors : total) {
      for (__m512& vector : vectors) vector = _mm512_setzero_ps();
    }
    for (int64_t t = 0; t < count; ++t) {
      const typename T::Value* token = v + offsets[t] + d;
      const char* ahead = reinterpret_cast<const char*>(v + offsets[std::min(t + kLanes, count - 1)] + d);
      for (int64_t line = 0; line < kMaxVectors * kLanes * int64_t{sizeof(*v)}; line += kCacheLine) {
        _mm_prefetch(ahead + line, _MM_HINT_T0);
      }
#pragma GCC unroll 4
      for (int64_t i = 0; i < kMaxVectors; ++i) {
        const __m512 values = T::Widen(token + i * kLanes, masks[i]);
#pragma GCC unroll 4
        for (int head = 0; head < kHeads; ++head) {
          total[head][i] = _mm512_fmadd_ps(_mm512_set1_ps(weights[head * stride + t]), values, total[head][i]);
        }
      }
    }
    for (int head = 0; head < kHeads; ++head) {
      const __m512 share = _mm512_set1_ps(1.0f / sums[head]);
      for (int64_t i = 0; i < kMaxVectors; ++i) {
        typename T::Value* place = out + head * head_dim + d + i * kLanes;
        if (masks[i]) T::Store(place, masks[i], _mm512_mul_ps(total[head][i], share));
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

// The query heads of one tile that share one kv head.
template <typename T>
void Attend(const Arrays<T>& arrays, const Shape& shape, int64_t tile, int64_t kv_head, float scale, int64_t window) {
  const int64_t group = shape.group();
  const int64_t start = arrays.query_starts[tile], seq_len = arrays.seq_lens[tile];
  const auto first_seen = [&](int64_t position) { return std::max<int64_t>(position + 1 - window, 0); };
  // Where the tokens that the tile sees lie in K and V.
  const int64_t begin = first_seen(start), end = std::min(start + shape.tile_len, seq_len);
  thread_local std::vector<int64_t> offsets;
  thread_local std::vector<float> weights, sums;
  const int64_t stride = (std::max<int64_t>(end - begin, 0) + kLanes - 1) / kLanes * kLanes;
  offsets.resize(stride);
  weights.resize(group * stride);
  sums.resize(group);
  for (int64_t position = begin; position < end; ++position) {
    const int64_t block = arrays.block_tables[tile * shape.max_blocks + position / shape.block_size];
    const int64_t slot = block * shape.block_size + position % shape.block_size;
    offsets[position - begin] = (slot * shape.num_kv_heads + kv_head) * shape.head_dim;
  }
  for (int64_t i = 0; i < shape.tile_len; ++i) {
    const int64_t query = ((tile * shape.tile_len + i) * shape.num_q_heads + kv_head * group) * shape.head_dim;
    const int64_t position = start + i;
    if (position < 0 || position >= seq_len) {  // padding, or a tile without tokens
      std::fill_n(arrays.out + query, group * shape.head_dim, typename T::Value{0});
      continue;
    }
    const int64_t* seen = offsets.data() + first_seen(position) - begin;
    const int64_t count = position + 1 - first_seen(position);
    for (int64_t head = 0; head < group; ++head) {
      sums[head] = Weigh<T>(arrays.q + query + head * shape.head_dim, arrays.k, seen, count, shape.head_dim, scale,
                            weights.data() + head * stride);
    }
    for (int64_t head = 0; head < group; head += kMaxHeads) {
      const auto gather = [&](auto heads) {
        Gather<T, decltype(heads)::value>(arrays.v, seen, count, shape.head_dim, weights.data() + head * stride, stride,
                                          sums.data() + head, arrays.out + query + head * shape.head_dim);
      };
      switch (std::min(group - head, kMaxHeads)) {
        case 1: gather(std::integral_constant<int, 1>()); break;
        case 2: gather(std::integral_constant<int, 2>()); break;
        case 3: gather(std::integral_constant<int, 3>()); break;
        default: gather(std::integral_constant<int, 4>());
      }
    }
  }
}

template <typename T>
void AttendAll(ffi::ThreadPool pool, const Shape& shape, const void* q, const void* k, const void* v,
               const int32_t* block_tables, const int32_t* query_starts, const int32_t* seq_lens, void* out, float scale,
               int64_t window) {
  using Value = typename T::Value;
  const Arrays<T> arrays{static_cast<const Value*>(q), static_cast<const Value*>(k), static_cast<const Value*>(v),
                         block_tables, query_starts, seq_lens, static_cast<Value*>(out)};
  Share(pool, shape.num_tiles * shape.num_kv_heads, [=](int64_t item, int64_t) {
    Attend<T>(arrays, shape, item / shape.num_kv_heads, item % shape.num_kv_heads, scale, window);
  });
}

ffi::Error Attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                     ffi::Buffer<ffi::S32> block_tables, ffi::Buffer<ffi::S32> query_starts,
                     ffi::Buffer<ffi::S32> seq_lens, ffi::Result<ffi::AnyBuffer> out, float scale, int64_t window) {
  const auto queries = q.dimensions(), cache = k.dimensions();
  const Shape shape{queries[0], queries[1], queries[2], queries[3], cache[2], cache[1], block_tables.dimensions()[1]};
  const auto attend = [&](auto type) {
    AttendAll<decltype(type)>(pool, shape, q.untyped_data(), k.untyped_data(), v.untyped_data(),
                              block_tables.typed_data(), query_starts.typed_data(), seq_lens.typed_data(),
                              out->untyped_data(), scale, window);
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
