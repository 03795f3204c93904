// What this machine can do at most with a target's instructions, on all of its threads: prints GFLOP/s of dot products
// in float32 and in bfloat16, and GB/s read from memory. Each is the best of many short runs.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "vector.h"

namespace {

using namespace native;

// Seconds of work(thread), done by all threads at once: the best of many.
template <typename Work>
double Best(int num_threads, int runs, Work work) {
  std::vector<double> best(runs);
  std::atomic<int> arrived{0};
  std::vector<std::thread> threads;
  std::vector<std::vector<double>> seconds(num_threads, std::vector<double>(runs));
  for (int t = 0; t < num_threads; ++t) {
    threads.emplace_back([&, t] {
      for (int run = 0; run < runs; ++run) {
        for (++arrived; arrived < num_threads * (run + 1);) continue;
        const auto start = std::chrono::steady_clock::now();
        work(t);
        seconds[t][run] = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (int run = 0; run < runs; ++run) {
    for (int t = 0; t < num_threads; ++t) best[run] = std::max(best[run], seconds[t][run]);
  }
  return *std::min_element(best.begin(), best.end());
}

// Sums that are in registers, and do not wait for each other.
template <typename T>
double Gflops(int num_threads) {
  constexpr int kSums = 10, kSteps = 40000;
  static const float numbers[16] = {1e-6f, 2e-6f};
  const double seconds = Best(num_threads, 300, [](int) {
    F32 sums[kSums];
    for (int i = 0; i < kSums; ++i) sums[i] = Splat(static_cast<float>(i));
    for (int step = 0; step < kSteps; ++step) {
      const F32 factor = Splat(numbers[step % 16]);
      UNROLL
      for (int i = 0; i < kSums; ++i) sums[i] = T::AddProduct(sums[i], factor, Load<Words>(numbers), 0);
    }
    volatile float kept;
    for (int i = 0; i < kSums; ++i) kept = sums[i][0];
  });
  return 2e-9 * num_threads * kSteps * kSums * kLanes * T::kValues / T::kFactors / seconds;
}

double Gigabytes(int num_threads) {
  constexpr int64_t kBytes = int64_t{128} << 20, kSums = 8;
  std::vector<std::vector<char>> memory(num_threads, std::vector<char>(kBytes, 1));
  const double seconds = Best(num_threads, 20, [&](int thread) {
    Words sums[kSums] = {};
    for (int64_t byte = 0; byte < kBytes; byte += kSums * kVectorBytes) {
      UNROLL
      for (int i = 0; i < kSums; ++i) sums[i] += Load<Words>(memory[thread].data() + byte + i * kVectorBytes);
    }
    volatile uint32_t kept;
    for (int i = 0; i < kSums; ++i) kept = sums[i][0];
  });
  return 1e-9 * num_threads * kBytes / seconds;
}

}  // namespace

int main(int, char** argv) {
  const int num_threads = atoi(argv[1]);
  std::printf("%.1f %.1f %.1f\n", Gflops<Float32>(num_threads), Gflops<BFloat16>(num_threads), Gigabytes(num_threads));
}
