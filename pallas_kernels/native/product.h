// `product`: x @ kernel.
//
// The kernel lies in memory as `pack` leaves it: panels of 32 columns, one after the other; a panel is a sequence of
// steps, and a step holds for each of its columns the next word along the sum. So a panel is read from its first byte
// to its last, or in two or four strips, while the one after it is fetched from memory in advance: arithmetic and
// memory overlap, and nothing is rearranged.
//
// A row's sum is taken in the order of the steps, in one lane of one register: its bits do not depend on the other
// rows. A row of zeros gives zeros and takes no time: so a batch of a fixed shape costs what the rows in use cost.

#ifndef PALLAS_KERNELS_NATIVE_PRODUCT_H_
#define PALLAS_KERNELS_NATIVE_PRODUCT_H_

#include "vector.h"
#include "work.h"

namespace native {

constexpr int64_t kPanelColumns = 32, kStepBytes = 4 * kPanelColumns;

// A tile is some rows times a strip of a panel. Its sums stay in registers: enough of them to hide an addition's
// latency, and few enough to leave room for the words, a factor, and what is widened: with one more compilers spill.
template <typename T>
constexpr int kTileRows = kLanes == 16          ? 8
                          : kLanes == 8         ? 7 - T::kFactors
                          : kNumRegisters == 32 ? 6 - T::kFactors
                                                : 3;

// Columns of a strip: of the whole panel for few rows, which then read it in order.
template <typename T>
constexpr int64_t StripColumns(int64_t num_rows) {
  constexpr int64_t kColumns = kLanes == 16 ? 32 : 16;
  return num_rows * kPanelColumns < kTileRows<T> * kColumns ? kPanelColumns : kColumns;
}

// What one product is about; `steps` long are a row of x and a column of the kernel.
struct ProductShape {
  int64_t rows, steps, columns;
  int64_t num_panels() const { return (columns + kPanelColumns - 1) / kPanelColumns; }
  int64_t panel_bytes() const { return steps * kStepBytes; }
  int64_t kernel_bytes() const { return num_panels() * panel_bytes(); }
};

// y[row] = the factors x[row] times a strip, for kRows rows. Meanwhile asks for a share, in parts of 65,536, of another
// panel: with each step for the same part of it again until the next one's turn comes, which costs less than a branch.
template <typename T, int kRows>
[[gnu::noinline]] void Tile(const uint32_t* const* x, const char* strip, int64_t steps, float* const* y,
                            const char* next, int64_t share) {
  constexpr int kVectors = StripColumns<T>(kRows) / kLanes;
  const uint32_t* factors[kRows];
  F32 sum[kRows][kVectors] = {};
  UNROLL
  for (int row = 0; row < kRows; ++row) factors[row] = x[row];
  for (int64_t step = 0; step < steps; ++step) {
    Prefetch(next + (step * share >> 16) * kStepBytes, kStepBytes);
    Words words[kVectors];
    UNROLL
    for (int v = 0; v < kVectors; ++v) words[v] = Load<Words>(strip + step * kStepBytes + v * kVectorBytes);
    UNROLL
    for (int i = 0; i < T::kFactors; ++i) {
      UNROLL
      for (int row = 0; row < kRows; ++row) {
        const F32 factor = Splat(factors[row][step * T::kFactors + i]);
        UNROLL
        for (int v = 0; v < kVectors; ++v) sum[row][v] = T::AddProduct(sum[row][v], factor, words[v], i);
      }
    }
  }
  UNROLL
  for (int row = 0; row < kRows; ++row) {
    UNROLL
    for (int v = 0; v < kVectors; ++v) Store(y[row] + v * kLanes, sum[row][v]);
  }
}

// The rows of x that are not all zeros: their numbers, and their factors, `stride` words from one to the next.
struct LiveRows {
  const int64_t* rows;
  int64_t count;
  const uint32_t* factors;
  int64_t stride;
};

// All live rows times one panel; meanwhile the panel that this thread takes next comes into its cache.
template <typename T>
void Panel(const LiveRows& live, const char* kernel, float* y, const ProductShape& shape, int64_t panel,
           int64_t next_panel) {
  const char* here = kernel + panel * shape.panel_bytes();
  const char* next = kernel + next_panel * shape.panel_bytes();
  int64_t num_tiles = 0, tile = 0;
  InBlocks(live.count, kTileRows<T>,
           [&](int64_t, int64_t count) { num_tiles += kPanelColumns / StripColumns<T>(count); });
  InBlocks(live.count, kTileRows<T>, [&](int64_t first, int64_t count) {
    const int64_t width = StripColumns<T>(count);
    for (int64_t strip = 0; strip < kPanelColumns; strip += width, ++tile) {
      const int64_t column = panel * kPanelColumns + strip, existing = shape.columns - column;
      if (existing <= 0) break;
      const uint32_t* x[kTileRows<T>];
      float *results[kTileRows<T>], whole[kTileRows<T>][kPanelColumns];
      for (int64_t i = 0; i < count; ++i) {
        x[i] = live.factors + live.rows[first + i] * live.stride;
        results[i] = existing < width ? whole[i] : y + live.rows[first + i] * shape.columns + column;
      }
      WithConstant<kTileRows<T>>(count, [&](auto rows) {
        const char* share = next + tile * shape.steps / num_tiles * kStepBytes;
        Tile<T, rows>(x, here + 4 * strip, shape.steps, results, share, 65536 / num_tiles);
      });
      for (int64_t i = 0; existing < width && i < count; ++i) {
        std::copy_n(whole[i], existing, y + live.rows[first + i] * shape.columns + column);
      }
    }
  });
}

// Whether a row has no number but zeros. Others are known soon: some words are looked at together.
template <typename T>
bool IsZero(const char* row, int64_t steps) {
  constexpr int64_t kSome = 64;
  for (int64_t first = 0; first < steps; first += kSome) {
    uint32_t any = 0;
    for (int64_t i = first; i < std::min(first + kSome, steps); ++i) any |= Load<uint32_t>(row + 4 * i);
    if (any & T::kMagnitude) return false;
  }
  return true;
}

// x [rows, steps * 1 or 2], kernel [panels, steps, 32, 1 or 2] -> y [rows, columns] float32.
template <typename T, typename Pool>
void Multiply(Pool& pool, const void* x, const void* kernel, float* y, const ProductShape& shape) {
  constexpr bool kWidens = T::kFactors > 1;
  constexpr int64_t kSome = 32;  // rows, fewer of which are not worth a thread
  thread_local Scratch<uint32_t> widened;
  thread_local Scratch<int64_t> live;
  thread_local Scratch<char> zero;
  const int64_t stride = shape.steps * T::kFactors;
  uint32_t* factors = widened.Get(kWidens ? shape.rows * stride : 0);
  char* is_zero = zero.Get(shape.rows);
  Share(pool, (shape.rows + kSome - 1) / kSome, [=](int64_t item, int64_t) {
    for (int64_t row = item * kSome; row < std::min((item + 1) * kSome, shape.rows); ++row) {
      const char* words = static_cast<const char*>(x) + row * shape.steps * 4;
      is_zero[row] = IsZero<T>(words, shape.steps);
      if (is_zero[row]) {
        std::fill_n(y + row * shape.columns, shape.columns, 0.0f);
      } else if constexpr (kWidens) {
        for (int64_t i = 0; i < stride; ++i) factors[row * stride + i] = Load<uint16_t>(words + 2 * i) << 16;
      }
    }
  });
  int64_t *rows = live.Get(shape.rows), count = 0;
  for (int64_t row = 0; row < shape.rows; ++row) {
    if (!is_zero[row]) rows[count++] = row;
  }
  if (count == 0) return;
  const LiveRows live_rows{rows, count, kWidens ? factors : static_cast<const uint32_t*>(x), stride};
  Share(pool, shape.num_panels(), [=](int64_t panel, int64_t next) {
    Panel<T>(live_rows, static_cast<const char*>(kernel), y, shape, panel, next);
  });
}

}  // namespace native

#endif  // PALLAS_KERNELS_NATIVE_PRODUCT_H_
