// `product`: x @ kernel.
//
// `pack` lays out the kernel (the weight) in panels of 32 columns, one after the other. A panel is a sequence of steps;
// a step holds the next word of each column. A panel is read from its first byte to its last, or in two or four strips,
// while the next one is prefetched: arithmetic and memory overlap, and nothing is rearranged.
//
// A row's sum is taken in the order of the steps, in one lane of one register, so its bits do not depend on the other
// rows. A row of zeros gives zeros and takes no time, so a batch of a fixed shape costs only its live rows.

#ifndef PALLAS_KERNELS_NATIVE_PRODUCT_H_
#define PALLAS_KERNELS_NATIVE_PRODUCT_H_

#include "vector.h"
#include "work.h"

namespace native {

constexpr int64_t kPanelColumns = 32, kStepBytes = 4 * kPanelColumns;

// The arguments of one product; a row of x and a column of the kernel have `steps` words.
struct ProductShape {
  int64_t rows, steps, columns;
  int64_t num_panels() const { return (columns + kPanelColumns - 1) / kPanelColumns; }
  int64_t panel_bytes() const { return steps * kStepBytes; }
  int64_t kernel_bytes() const { return num_panels() * panel_bytes(); }
};

// Columns of a strip: the whole panel for few rows, which then read it in order. K is the kernel's format in memory.
template <typename K>
constexpr int64_t StripColumns(int64_t num_rows) {
  constexpr int64_t kColumns = kLanes == 16 ? 32 : 16;
  return num_rows * kPanelColumns < K::kTileRows * kColumns ? kPanelColumns : kColumns;
}

// The range of the next panel that a tile prefetches: the `tile`th of `num_tiles`.
struct Ahead {
  int64_t panel, tile, num_tiles;
  int64_t first(int64_t steps) const { return tile * steps / num_tiles; }
  int64_t share() const { return 65536 / num_tiles; }  // steps to prefetch for each step computed, in 1/65,536
};

// A kernel in float32 or bfloat16.
template <typename T>
struct DenseKernel {
  using X = T;
  // A tile is some rows times a strip of a panel. Its sums stay in registers: enough of them to hide an addition's
  // latency, and few enough to leave room for the words, a factor, and what is widened: with one more compilers spill.
  static constexpr int kTileRows = kLanes == 16          ? 8
                                   : kLanes == 8         ? 7 - T::kFactors
                                   : kNumRegisters == 32 ? 6 - T::kFactors
                                                         : 3;

  const char* panels;
  int64_t steps;

  int64_t x_words() const { return steps; }
  // Words that a row is widened to; 0 if it is used as it is.
  int64_t num_factors() const { return T::kFactors > 1 ? steps * T::kFactors : 0; }
  void Widen(const char* row, uint32_t* factors) const {
    for (int64_t i = 0; i < num_factors(); ++i) factors[i] = Load<uint16_t>(row + 2 * i) << 16;
  }

  // Computes y[row] = x[row] times the strip of a panel that begins at `column`, for kRows rows.
  template <int kRows>
  void Tile(const uint32_t* const* x, int64_t panel, int64_t column, float* const* y, const Ahead& ahead) const {
    const int64_t panel_bytes = steps * kStepBytes;
    const char* strip = panels + panel * panel_bytes + 4 * column;
    const char* next = panels + ahead.panel * panel_bytes + ahead.first(steps) * kStepBytes;
    if (kReadsAhead || ahead.num_tiles > 1) return SumAsking<kRows, kTurnLines>(x, strip, y, next, ahead);
    Prefetch(next, kFirstBytes);
    Sum<kRows, 0>(x, strip, steps, y, next, 0);
  }

 private:
  // Steps of a turn of the loop, and the lines that they are. The fewer instructions there are beside the products, the
  // less it matters what else runs on the core; 32 registers have more products a step.
  static constexpr int kTurn = kNumRegisters == 32 ? 1 : 4, kTurnLines = kTurn * kStepBytes / kCacheLine;
  // Whether one tile prefetches all of the next panel. Otherwise it prefetches the beginning, and the processor's own
  // prefetcher does the rest: in float32 with AVX2 that is faster by a tenth.
  static constexpr bool kReadsAhead = kNumRegisters == 32 || T::kFactors > 1;
  static constexpr int64_t kFirstBytes = 1024;

  // Prefetches as few lines in each turn as all tiles together need.
  template <int kRows, int kLines>
  void SumAsking(const uint32_t* const* x, const char* strip, float* const* y, const char* next,
                 const Ahead& ahead) const {
    if constexpr (kLines > 1) {
      if (ahead.num_tiles * kLines >= 2 * kTurnLines) return SumAsking<kRows, kLines / 2>(x, strip, y, next, ahead);
    }
    Sum<kRows, kLines>(x, strip, steps, y, next, ahead.share() * kTurnLines);
  }

  // `share`: lines to prefetch in a turn, in 1/65,536. Some of kLines may have been prefetched before.
  template <int kRows, int kLines>
  [[gnu::noinline]] static void Sum(const uint32_t* const* x, const char* strip, int64_t steps, float* const* y,
                                    const char* next, int64_t share) {
    constexpr int kVectors = StripColumns<DenseKernel>(kRows) / kLanes;
    const uint32_t* factors[kRows];
    F32 sum[kRows][kVectors] = {};
    UNROLL
    for (int row = 0; row < kRows; ++row) factors[row] = x[row];
    int64_t step = 0, ahead = 0;
    for (; step + kTurn <= steps; ahead += share) {
      const char* lines = next + (ahead >> 16) * kCacheLine;
      UNROLL
      for (int i = 0; i < kTurn; ++i) {
        UNROLL
        for (int line = i * kLines / kTurn; line < (i + 1) * kLines / kTurn; ++line) {
          Prefetch(lines + line * kCacheLine, kCacheLine);
        }
        AddStep(factors, step, strip, sum);
        ++step, strip += kStepBytes;
        // Step by step: loading early for a later step would take registers that sums need.
        if (kTurn > 1) Forget(strip), Forget(step);
      }
    }
    for (; step < steps; ++step, strip += kStepBytes) AddStep(factors, step, strip, sum);
    UNROLL
    for (int row = 0; row < kRows; ++row) {
      UNROLL
      for (int v = 0; v < kVectors; ++v) Store(y[row] + v * kLanes, sum[row][v]);
    }
  }

  template <int kRows, int kVectors>
  [[gnu::always_inline]] static void AddStep(const uint32_t* const (&factors)[kRows], int64_t step, const char* strip,
                                             F32 (&sum)[kRows][kVectors]) {
    Words words[kVectors];
    UNROLL
    for (int v = 0; v < kVectors; ++v) words[v] = Load<Words>(strip + v * kVectorBytes);
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
};

// The live rows of x, which are not all zeros: their indices, and their words, `stride` words apart.
struct LiveRows {
  const int64_t* rows;
  int64_t count;
  const uint32_t* factors;
  int64_t stride;
};

// Multiplies all live rows by one panel, and prefetches the panel that this thread takes next.
template <typename K>
void Panel(const LiveRows& live, const K& kernel, float* y, int64_t columns, int64_t panel, int64_t next_panel) {
  Ahead ahead{next_panel, 0, 0};
  InBlocks(live.count, K::kTileRows,
           [&](int64_t, int64_t count) { ahead.num_tiles += kPanelColumns / StripColumns<K>(count); });
  const int64_t begin = panel * kPanelColumns, existing = std::min(columns - begin, kPanelColumns);
  InBlocks(live.count, K::kTileRows, [&](int64_t first, int64_t count) {
    WithConstant<K::kTileRows>(count, [&](auto rows) {
      constexpr int kRows = rows;
      constexpr int64_t kWidth = StripColumns<K>(kRows);
      const uint32_t* x[kRows];
      float *results[kRows], *there[kRows], whole[kRows][kWidth];
      for (int i = 0; i < kRows; ++i) {
        const int64_t row = live.rows[first + i];
        x[i] = live.factors + row * live.stride;
        results[i] = y + row * columns + begin;
      }
      for (int64_t strip = 0; strip < existing; strip += kWidth, ++ahead.tile) {
        const bool is_whole = strip + kWidth <= existing;
        for (int i = 0; i < kRows; ++i) there[i] = is_whole ? results[i] + strip : whole[i];
        kernel.template Tile<kRows>(x, panel, strip, there, ahead);
        for (int i = 0; !is_whole && i < kRows; ++i) std::copy_n(whole[i], existing - strip, results[i] + strip);
      }
    });
  });
}

// Returns whether a row is all zeros. It looks at some words together, and stops at the first that is not zero.
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

// x [rows, of words], a kernel -> y [rows, columns] float32.
template <typename K, typename Pool>
void MultiplyBy(Pool& pool, const void* x, const K& kernel, float* y, int64_t num_rows, int64_t columns) {
  constexpr int64_t kSome = 32;  // rows; fewer are not worth a thread
  thread_local Scratch<uint32_t> widened;
  thread_local Scratch<int64_t> live;
  thread_local Scratch<char> zero;
  const int64_t x_words = kernel.x_words(), num_factors = kernel.num_factors();
  uint32_t* factors = widened.Get(num_rows * num_factors);
  char* is_zero = zero.Get(num_rows);
  Share(pool, (num_rows + kSome - 1) / kSome, [=](int64_t item, int64_t) {
    for (int64_t row = item * kSome; row < std::min((item + 1) * kSome, num_rows); ++row) {
      const char* words = static_cast<const char*>(x) + row * x_words * 4;
      is_zero[row] = IsZero<typename K::X>(words, x_words);
      if (is_zero[row]) {
        std::fill_n(y + row * columns, columns, 0.0f);
      } else if (num_factors > 0) {
        kernel.Widen(words, factors + row * num_factors);
      }
    }
  });
  int64_t *rows = live.Get(num_rows), count = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    if (!is_zero[row]) rows[count++] = row;
  }
  if (count == 0) return;
  const LiveRows live_rows = num_factors > 0 ? LiveRows{rows, count, factors, num_factors}
                                             : LiveRows{rows, count, static_cast<const uint32_t*>(x), x_words};
  const int64_t num_panels = (columns + kPanelColumns - 1) / kPanelColumns;
  Share(pool, num_panels,
        [=](int64_t panel, int64_t next) { Panel(live_rows, kernel, y, columns, panel, next); });
}

// x [rows, steps * 1 or 2], kernel [panels, steps, 32, 1 or 2] -> y [rows, columns] float32.
template <typename T, typename Pool>
void Multiply(Pool& pool, const void* x, const void* kernel, float* y, const ProductShape& shape) {
  MultiplyBy(pool, x, DenseKernel<T>{static_cast<const char*>(kernel), shape.steps}, y, shape.rows, shape.columns);
}

}  // namespace native

#endif  // PALLAS_KERNELS_NATIVE_PRODUCT_H_
