// `product`: x @ kernel for CPUs with AVX-512.
//
// The kernel lies in memory as `pack` leaves it: panels of 32 columns, one after the other; a panel is a
// sequence of steps, and a step holds for each of its columns the next value (float32) or the next two (bfloat16)
// along the sum. So a panel is read from its first byte to its last, while the one after it is fetched from memory
// in advance: arithmetic and memory overlap, and nothing is rearranged.
//
// A row's sum is taken in the order of the steps, by one accumulator: its bits do not depend on the other rows. A row
// of zeros gives zeros and takes no time: so a batch of a fixed shape costs what the rows in use cost.

#include <vector>

#include "common.h"

namespace {

using namespace native;

constexpr int64_t kPanelWidth = 2 * kLanes;  // columns
constexpr int64_t kStepBytes = 4 * kPanelWidth;
constexpr int64_t kTileRows = 8;  // 16 accumulators: enough to hide an addition's latency

// What one product is about; `steps` long are a row of x and a column of the kernel.
struct Shape {
  int64_t rows, steps, columns;
  int64_t num_panels() const { return (columns + kPanelWidth - 1) / kPanelWidth; }
  int64_t panel_bytes() const { return steps * kStepBytes; }
};

// `kRows` rows times one panel. Fetches `kFetches` cache lines of `next` a step.
template <typename T, int kRows, int kFetches>
void Tile(const typename T::Pair* const x[kTileRows], const char* panel, const char* next, int64_t steps,
          float* const y[kTileRows], __mmask16 low, __mmask16 high) {
  __m512 sum[kRows][2];
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) sum[row][0] = sum[row][1] = _mm512_setzero_ps();
  for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 2
    for (int line = 0; line < kFetches; ++line) {
      _mm_prefetch(next + kCacheLine * (kFetches * step + line), _MM_HINT_T1);
    }
    const __m512 k0 = _mm512_loadu_ps(panel + kStepBytes * step);
    const __m512 k1 = _mm512_loadu_ps(panel + kStepBytes * step + kCacheLine);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const __m512 value = T::Broadcast(x[row] + step);
      sum[row][0] = T::AddProduct(sum[row][0], value, k0);
      sum[row][1] = T::AddProduct(sum[row][1], value, k1);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row) {
    _mm512_mask_storeu_ps(y[row], low, sum[row][0]);
    _mm512_mask_storeu_ps(y[row] + kLanes, high, sum[row][1]);
  }
}

// The rows that are not all zeros.
template <typename T>
std::vector<int64_t> LiveRows(const typename T::Pair* x, const Shape& shape) {
  std::vector<int64_t> live;
  for (int64_t row = 0; row < shape.rows; ++row) {
    const auto* values = reinterpret_cast<const typename T::Value*>(x + row * shape.steps);
    const auto* end = reinterpret_cast<const typename T::Value*>(x + (row + 1) * shape.steps);
    if (std::any_of(values, end, T::IsNotZero)) live.push_back(row);
  }
  return live;
}

// All live rows times one panel, and zeros for the others; meanwhile the panel that this thread takes next comes into
// its cache.
template <typename T>
void Panel(const typename T::Pair* x, const char* kernel, float* y, const Shape& shape,
           const std::vector<int64_t>& live, int64_t panel, int64_t next_panel) {
  const char* here = kernel + panel * shape.panel_bytes();
  const char* next = kernel + next_panel * shape.panel_bytes();
  const int64_t column = panel * kPanelWidth, num_live = live.size();
  const __mmask16 low = static_cast<__mmask16>(Existing(column, shape.columns, kLanes));
  const __mmask16 high = static_cast<__mmask16>(Existing(column + kLanes, shape.columns, kLanes));
  if (num_live < shape.rows) {
    for (int64_t row = 0; row < shape.rows; ++row) {
      _mm512_mask_storeu_ps(y + row * shape.columns + column, low, _mm512_setzero_ps());
      _mm512_mask_storeu_ps(y + row * shape.columns + column + kLanes, high, _mm512_setzero_ps());
    }
  }
  for (int64_t first = 0; first < num_live; first += kTileRows) {
    const int64_t count = std::min(kTileRows, num_live - first);
    // A tile with fewer rows than its code repeats the last one, and drops what comes of it.
    const typename T::Pair* rows[kTileRows];
    float* results[kTileRows];
    float dropped[kPanelWidth];
    for (int64_t i = 0; i < kTileRows; ++i) {
      const int64_t row = live[first + std::min(i, count - 1)];
      rows[i] = x + row * shape.steps;
      results[i] = i < count ? y + row * shape.columns + column : dropped;
    }
    const auto tile = [&](auto num_rows) {
      constexpr int kRows = decltype(num_rows)::value;
      if (num_live <= kTileRows) {
        Tile<T, kRows, 2>(rows, here, next, shape.steps, results, low, high);
      } else if (first < 2 * kTileRows) {
        const char* half = next + first / kTileRows * shape.panel_bytes() / 2;
        Tile<T, kRows, 1>(rows, here, half, shape.steps, results, low, high);
      } else {
        Tile<T, kRows, 0>(rows, here, next, shape.steps, results, low, high);
      }
    };
    if (count > 4) {
      tile(std::integral_constant<int, 8>());
    } else if (count > 2) {
      tile(std::integral_constant<int, 4>());
    } else if (count > 1) {
      tile(std::integral_constant<int, 2>());
    } else {
      tile(std::integral_constant<int, 1>());
    }
  }
}

template <typename T>
void Multiply(ffi::ThreadPool pool, const void* x, const void* kernel, float* y, const Shape& shape) {
  const auto* rows = static_cast<const typename T::Pair*>(x);
  Share(pool, shape.num_panels(), [=, live = LiveRows<T>(rows, shape)](int64_t panel, int64_t next) {
    Panel<T>(rows, static_cast<const char*>(kernel), y, shape, live, panel, next);
  });
}

// x [rows, steps * 1 or 2], kernels [layers, panels, steps, 32, 1 or 2], layer -> y [rows, columns] float32.
ffi::Error Product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer kernels, ffi::Buffer<ffi::S32> layer,
                   ffi::ResultBuffer<ffi::F32> y) {
  const Shape shape{x.dimensions()[0], kernels.dimensions()[2], y->dimensions()[1]};
  const char* kernel = static_cast<const char*>(kernels.untyped_data()) +
                       layer.typed_data()[0] * shape.num_panels() * shape.panel_bytes();
  if (kernels.element_type() == ffi::F32) {
    Multiply<Float32>(pool, x.untyped_data(), kernel, y->typed_data(), shape);
    return ffi::Error::Success();
  }
#ifdef __AVX512BF16__
  if (kernels.element_type() == ffi::BF16) {
    Multiply<BFloat16>(pool, x.untyped_data(), kernel, y->typed_data(), shape);
    return ffi::Error::Success();
  }
#endif
  return ffi::Error::InvalidArgument("a packed kernel must be float32, or bfloat16 with AVX512_BF16");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpaged_product, Product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
