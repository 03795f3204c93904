// Decode attention from outside, in C++ behind XLA's foreign function interface. One query a sequence.

#include <algorithm>
#include <cmath>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;

// q, out: [rows, heads, dim]; k, v: [blocks, block_size, kv_heads, dim]; tables: [rows, most]; lens: [rows].
static ffi::Error Attend(float scale, Floats q, Floats k, Floats v, Ints tables, Ints lens,
                         ffi::Result<Floats> out) {
  const auto shape = q.dimensions();
  const auto blocks = k.dimensions();
  const int64_t rows = shape[0], heads = shape[1], dim = shape[2];
  const int64_t block_size = blocks[1], kv_heads = blocks[2], most = tables.dimensions()[1];
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t length = lens.typed_data()[row];
    for (int64_t head = 0; head < heads; ++head) {
      const float* query = q.typed_data() + (row * heads + head) * dim;
      float* result = out->typed_data() + (row * heads + head) * dim;
      std::fill(result, result + dim, 0.0f);
      std::vector<float> weights(length);
      auto at = [&](Floats& cache, int64_t token) {
        const int64_t block = tables.typed_data()[row * most + token / block_size];
        const int64_t kv_head = head * kv_heads / heads;
        return cache.typed_data() + ((block * block_size + token % block_size) * kv_heads + kv_head) * dim;
      };
      float largest = -INFINITY, total = 0;
      for (int64_t t = 0; t < length; ++t) {
        const float* key = at(k, t);
        float sum = 0;
        for (int64_t i = 0; i < dim; ++i) sum += query[i] * key[i];
        largest = std::max(largest, weights[t] = scale * sum);
      }
      for (float& weight : weights) total += weight = std::exp(weight - largest);
      for (int64_t t = 0; t < length; ++t) {
        const float* value = at(v, t);
        for (int64_t i = 0; i < dim; ++i) result[i] += weights[t] / total * value[i];
      }
    }
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(Outsider, Attend,
                              ffi::Ffi::Bind()
                                  .Attr<float>("scale")
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Ret<Floats>());
