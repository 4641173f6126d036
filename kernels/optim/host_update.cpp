// Updates of flat fp32 arrays on the host, in one pass over memory: Adam and AdamW, SGD with momentum, Lion.
//
// All bits are those of torch's own CPU kernels, so that ranks with and without a compiler agree. That takes
//   contraction   none by the compiler: a product is added without being rounded first only where `fma` is written
//   spans         those that torch gives to its threads: what is left of one after whole vectors is computed without fma
// host_update.py compares a sample with torch's rules before this is used.

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {

constexpr int64_t kBlock = 1024;   // elements; a page of each array is fetched while the page before it is updated
constexpr int64_t kLine = 16;      // elements of a cache line, and the multiple to which torch rounds spans of Adam
constexpr int64_t kGrain = 32768;  // elements: torch starts no thread of an elementwise operator for fewer

int64_t quotient_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Call body(begin, end) for each span of [begin, end) that torch gives to one of `threads` threads.
template <class Body>
void spread(int64_t begin, int64_t end, int64_t threads, const Body& body) {
  if (begin >= end) return;
  const int64_t each = quotient_up(end - begin, threads), spans = quotient_up(end - begin, each);
  if (spans == 1) return body(begin, end);
#pragma omp parallel for schedule(static, 1) num_threads(static_cast<int>(spans))
  for (int64_t span = 0; span < spans; ++span)
    body(begin + span * each, std::min(end, begin + (span + 1) * each));
}

// Update [begin, end): whole vectors of `lanes` by rule.many, and the rest by rule.one.
template <class Rule>
void update(const Rule& rule, int64_t begin, int64_t end, int64_t lanes) {
  const int64_t whole = end - (end - begin) % lanes;
  for (int64_t at = begin; at < whole; at += kBlock) {
    const int64_t stop = std::min(whole, at + kBlock), next = std::min(whole, stop + kBlock);
    for (const float* array : rule.arrays)  // the hardware looks ahead within a page only
      for (int64_t i = stop; i < next; i += kLine) __builtin_prefetch(array + i, 0, 3);
    rule.many(at, stop);
  }
  for (int64_t at = whole; at < end; ++at) rule.one(at);
}

// a / b by the reciprocal of b: rounded as the division is (Markstein 1990), in less time.
inline float divided(float a, float b, float reciprocal) {
  const float quotient = a * reciprocal, rest = std::fma(-quotient, b, a);
  return rest == rest ? std::fma(rest, reciprocal, quotient) : quotient;  // an infinite quotient has no rest
}

enum Decay { kNone, kOfWeights, kOfGradient };

struct AdamNumbers {
  float shrink, decay, first_rest, beta2, second_rest, root, eps, step_size;
};

template <Decay decay, bool small>
struct Adam {
  float *__restrict w, *__restrict m, *__restrict v;
  const float* __restrict g;
  AdamNumbers by;
  const float* arrays[4] = {w, g, m, v};

  void many(int64_t begin, int64_t end) const {
    const float reciprocal = 1.0f / by.root;
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
      float weight = w[i], grad = g[i];
      if (decay == kOfWeights) weight *= by.shrink;
      if (decay == kOfGradient) grad += weight * by.decay;
      const float way = grad - m[i];
      const float first = small ? std::fma(by.first_rest, way, m[i]) : std::fma(by.first_rest - 1.0f, way, grad);
      const float second = v[i] * by.beta2 + by.second_rest * grad * grad;
      m[i] = first;
      v[i] = second;
      w[i] = weight + -by.step_size * first / (divided(std::sqrt(second), by.root, reciprocal) + by.eps);
    }
  }

  void one(int64_t i) const {
    float weight = w[i], grad = g[i];
    if (decay == kOfWeights) weight *= by.shrink;
    if (decay == kOfGradient) grad += weight * by.decay;
    const float way = grad - m[i];
    m[i] = small ? m[i] + by.first_rest * way : grad - way * (1.0f - by.first_rest);
    v[i] = v[i] * by.beta2 + by.second_rest * grad * grad;
    w[i] = weight - by.step_size * m[i] / (std::sqrt(v[i]) / by.root + by.eps);
  }
};

template <Decay decay, bool small>
void adam(float* w, const float* g, float* m, float* v, int64_t count, const AdamNumbers& by, int64_t threads,
          int64_t lanes) {
  const Adam<decay, small> rule{w, m, v, g, by};
  const auto body = [&](int64_t begin, int64_t end) { update(rule, begin, end, lanes); };
  const int64_t lines = quotient_up(count, threads) / kLine * threads * kLine;  // whole lines for every thread
  spread(0, lines, threads, body);
  spread(lines, count, threads, body);
}

struct SgdNumbers {
  float lr, momentum, rest, decay;
};

template <bool decays, bool first, bool nesterov>
struct Sgd {
  float *__restrict w, *__restrict m;
  const float* __restrict g;
  SgdNumbers by;
  const float* arrays[3] = {w, g, m};

  void many(int64_t begin, int64_t end) const {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) one(i);
  }

  inline void one(int64_t i) const {
    float grad = g[i];
    if (decays) grad += w[i] * by.decay;
    m[i] = first ? grad : m[i] * by.momentum + grad * by.rest;
    w[i] -= (nesterov ? grad + m[i] * by.momentum : m[i]) * by.lr;
  }
};

template <bool decays, bool first, bool nesterov>
void sgd(float* w, const float* g, float* m, int64_t count, const SgdNumbers& by, int64_t threads) {
  const Sgd<decays, first, nesterov> rule{w, m, g, by};
  spread(0, count, threads, [&](int64_t begin, int64_t end) { update(rule, begin, end, kLine); });
}

struct LionNumbers {
  float lr, shrink, direction_rest, momentum_rest;
};

struct Lion {
  float *__restrict w, *__restrict m;
  const float* __restrict g;
  LionNumbers by;
  const float* arrays[3] = {w, g, m};

  static float lerp(float a, float b, float rest) {
    return std::fabs(rest) < 0.5f ? std::fma(rest, b - a, a) : std::fma(rest - 1.0f, b - a, b);
  }

  static float lerp_in_two(float a, float b, float rest) {
    return std::fabs(rest) < 0.5f ? a + rest * (b - a) : b - (b - a) * (1.0f - rest);
  }

  void step(int64_t i, float towards, float momentum) const {
    const float sign = static_cast<float>(towards > 0.0f) - static_cast<float>(towards < 0.0f);
    w[i] = w[i] * by.shrink + -by.lr * sign;
    m[i] = momentum;
  }

  void many(int64_t begin, int64_t end) const {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i)
      step(i, lerp(m[i], g[i], by.direction_rest), lerp(m[i], g[i], by.momentum_rest));
  }

  void one(int64_t i) const {
    step(i, lerp_in_two(m[i], g[i], by.direction_rest), lerp_in_two(m[i], g[i], by.momentum_rest));
  }
};

}  // namespace

// Each updates `count` elements in place with `threads` threads; `lanes` are the elements of torch's vectors.
extern "C" {

void trine_adam(float* w, const float* g, float* m, float* v, int64_t count, const AdamNumbers* by, int decay,
                int64_t threads, int64_t lanes) {
  const bool small = std::fabs(by->first_rest) < 0.5f;
  auto chosen = small ? adam<kNone, true> : adam<kNone, false>;
  if (decay == kOfWeights) chosen = small ? adam<kOfWeights, true> : adam<kOfWeights, false>;
  if (decay == kOfGradient) chosen = small ? adam<kOfGradient, true> : adam<kOfGradient, false>;
  chosen(w, g, m, v, count, *by, threads, lanes);
}

void trine_sgd(float* w, const float* g, float* m, int64_t count, const SgdNumbers* by, int first, int nesterov,
               int64_t threads) {
  auto chosen = first ? sgd<true, true, false> : sgd<true, false, false>;
  if (nesterov) chosen = first ? sgd<true, true, true> : sgd<true, false, true>;
  if (by->decay == 0.0f && !nesterov) chosen = first ? sgd<false, true, false> : sgd<false, false, false>;
  if (by->decay == 0.0f && nesterov) chosen = first ? sgd<false, true, true> : sgd<false, false, true>;
  chosen(w, g, m, count, *by, threads);
}

void trine_lion(float* w, const float* g, float* m, int64_t count, const LionNumbers* by, int64_t threads,
                int64_t lanes) {
  const Lion rule{w, m, g, *by};
  const int64_t most = threads == 1 || count < kGrain ? 1 : std::min(threads, quotient_up(count, kGrain));
  spread(0, count, most, [&](int64_t begin, int64_t end) { update(rule, begin, end, lanes); });
}

}  // extern "C"
