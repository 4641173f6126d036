// The reads and writes of an update without its arithmetic: four fp32 arrays are read, and three of them written,
// which leaves them as they are: `zero` is 0, which the compiler does not know.

#include <algorithm>
#include <cstdint>

namespace {

void pass(float* w, const float* g, float* m, float* v, float zero, int64_t begin, int64_t end) {
#pragma omp simd
  for (int64_t i = begin; i < end; ++i) {
    w[i] += zero * g[i];
    m[i] += zero * g[i];
    v[i] += zero * g[i];
  }
}

}  // namespace

extern "C" void memory_pass(float* w, const float* g, float* m, float* v, float zero, int64_t count, int64_t threads) {
  const int64_t each = (count + threads - 1) / threads;
#pragma omp parallel for schedule(static, 1) num_threads(static_cast<int>(threads))
  for (int64_t thread = 0; thread < threads; ++thread)
    pass(w, g, m, v, zero, std::min(count, thread * each), std::min(count, (thread + 1) * each));
}
