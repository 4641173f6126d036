// The reads and writes of an update without its arithmetic: four fp32 arrays are read, and three of them written,
// which leaves them as they are: `zero` is 0, which the compiler does not know.

#include <algorithm>
#include <cstdint>

namespace {

constexpr int64_t kBlock = 1024, kLine = 16;  // elements

void pass(float* w, const float* g, float* m, float* v, float zero, int64_t begin, int64_t end) {
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t stop = std::min(end, at + kBlock), next = std::min(end, stop + kBlock);
    for (const float* array : {static_cast<const float*>(w), g, static_cast<const float*>(m), static_cast<const float*>(v)})
      for (int64_t i = stop; i < next; i += kLine) __builtin_prefetch(array + i, 0, 3);
#pragma omp simd
    for (int64_t i = at; i < stop; ++i) {
      w[i] += zero * g[i];
      m[i] += zero * g[i];
      v[i] += zero * g[i];
    }
  }
}

}  // namespace

extern "C" void memory_pass(float* w, const float* g, float* m, float* v, float zero, int64_t count, int64_t threads) {
  const int64_t each = (count + threads - 1) / threads;
#pragma omp parallel for schedule(static, 1) num_threads(static_cast<int>(threads))
  for (int64_t thread = 0; thread < threads; ++thread)
    pass(w, g, m, v, zero, std::min(count, thread * each), std::min(count, (thread + 1) * each));
}
