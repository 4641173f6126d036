// Updates of flat fp32 arrays on the host, in one pass over memory: Adam and AdamW, SGD with momentum, Lion.
//
// All bits are those of torch's own CPU kernels, so that ranks with and without a compiler agree. That takes
//   contraction   none by the compiler: a product is added without being rounded first only where `fma` is written
//   spans         those that torch gives to its threads: what is left of one after whole vectors has no fma at all
// host_update.py compares a sample with torch's rules before this is used.

#include <algorithm>
#include <cmath>
#include <cstdint>

#define INLINE __attribute__((always_inline)) inline  // a loop with a call in it has no vectors

namespace {

constexpr int64_t kBlock = 1024;   // elements; a page of each array is fetched while the page before it is updated
constexpr int64_t kLine = 16;      // elements of a cache line
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

// The same for [0, count) in whole cache lines, as torch's fused updates are cut.
template <class Body>
void spread_lines(int64_t count, int64_t threads, const Body& body) {
  spread(0, quotient_up(count, kLine), threads,
         [&](int64_t begin, int64_t end) { body(begin * kLine, std::min(count, end * kLine)); });
}

// Update [begin, end): whole vectors of `lanes` by rule.lane for each element, and the rest by rule.rest.
template <class Rule>
void update(const Rule& rule, int64_t begin, int64_t end, int64_t lanes) {
  const Rule own = rule;  // no store can change a copy, so that its numbers stay in registers
  const int64_t whole = end - (end - begin) % lanes;
  for (int64_t at = begin; at < whole; at += kBlock) {
    const int64_t stop = std::min(whole, at + kBlock), next = std::min(whole, stop + kBlock);
    for (const float* array : rule.arrays)  // the hardware looks ahead within a page only
      for (int64_t i = stop; i < next; i += kLine) __builtin_prefetch(array + i, 0, 3);
#pragma omp simd
    for (int64_t i = at; i < stop; ++i) own.lane(i);
  }
  for (int64_t i = whole; i < end; ++i) own.rest(i);
}

// a / b by the reciprocal of b: rounded as the division is (Markstein 1990), in less time.
INLINE float divided(float a, float b, float reciprocal) {
  const float quotient = a * reciprocal, off = std::fma(-quotient, b, a);
  return off == off ? std::fma(off, reciprocal, quotient) : quotient;  // an infinite quotient is off by no number
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
  const float reciprocal = 1.0f / by.root;
  const float* arrays[4] = {w, g, m, v};

  INLINE void lane(int64_t i) const {
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

  INLINE void rest(int64_t i) const {
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
  spread_lines(count, threads, [&](int64_t begin, int64_t end) { update(rule, begin, end, lanes); });
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

  INLINE void lane(int64_t i) const {
    float grad = g[i];
    if (decays) grad += w[i] * by.decay;
    m[i] = first ? grad : m[i] * by.momentum + grad * by.rest;
    w[i] -= (nesterov ? grad + m[i] * by.momentum : m[i]) * by.lr;
  }

  INLINE void rest(int64_t i) const { lane(i); }
};

template <bool decays, bool first, bool nesterov>
void sgd(float* w, const float* g, float* m, int64_t count, const SgdNumbers& by, int64_t threads) {
  const Sgd<decays, first, nesterov> rule{w, m, g, by};
  spread_lines(count, threads, [&](int64_t begin, int64_t end) { update(rule, begin, end, 1); });
}

struct LionNumbers {
  float lr, shrink, direction_rest, momentum_rest;
};

struct Lion {
  float *__restrict w, *__restrict m;
  const float* __restrict g;
  LionNumbers by;
  const float* arrays[3] = {w, g, m};

  INLINE void lane(int64_t i) const {
    const float way = g[i] - m[i];
    step(i, between(m[i], g[i], way, by.direction_rest), between(m[i], g[i], way, by.momentum_rest));
  }

  INLINE void rest(int64_t i) const {
    const float way = g[i] - m[i];
    step(i, between_without_fma(m[i], g[i], way, by.direction_rest),
         between_without_fma(m[i], g[i], way, by.momentum_rest));
  }

  INLINE static float between(float a, float b, float way, float part) {
    return std::fabs(part) < 0.5f ? std::fma(part, way, a) : std::fma(part - 1.0f, way, b);
  }

  INLINE static float between_without_fma(float a, float b, float way, float part) {
    return std::fabs(part) < 0.5f ? a + part * way : b - way * (1.0f - part);
  }

  INLINE void step(int64_t i, float direction, float momentum) const {
    const float sign = static_cast<float>(direction > 0.0f) - static_cast<float>(direction < 0.0f);
    w[i] = w[i] * by.shrink + -by.lr * sign;
    m[i] = momentum;
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
