// Updates of flat fp32 arrays on the host, in one pass over memory: Adam and AdamW, Lion.
//
// All bits are those of torch's own CPU kernels, so that ranks with and without a compiler agree. Which products torch
// adds without rounding them first is written here as `fma`, and the compiler may choose no others. Of a sum of two
// products torch leaves one or the other unrounded: the second one in whole vectors, the first one in what is left.
// host_update.py compares a sample with torch's rules before this is used.

#include <algorithm>
#include <cmath>
#include <cstdint>

#define INLINE __attribute__((always_inline)) inline  // a loop with a call in it has no vectors

namespace {

constexpr int64_t kLine = 16;  // elements of a cache line

int64_t quotient_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Update [begin, end): whole vectors of `lanes`, and what is left.
template <class Rule>
void update_span(const Rule& rule, int64_t begin, int64_t end, int64_t lanes) {
  const Rule own = rule;  // no store can change a copy, so that its numbers stay in registers
  const int64_t whole = end - (end - begin) % lanes;
#pragma omp simd
  for (int64_t i = begin; i < whole; ++i) own.template element<true>(i);
  for (int64_t i = whole; i < end; ++i) own.template element<false>(i);
}

// Update [0, count), cut as torch cuts it: every thread has whole lines, the last one what is left.
template <class Rule>
void update(const Rule& rule, int64_t count, int64_t threads, int64_t lanes) {
  if (count == 0) return;
  const int64_t each = quotient_up(quotient_up(count, kLine), threads) * kLine, spans = quotient_up(count, each);
  if (spans == 1) return update_span(rule, 0, count, lanes);
#pragma omp parallel for schedule(static, 1) num_threads(static_cast<int>(spans))
  for (int64_t span = 0; span < spans; ++span)
    update_span(rule, span * each, std::min(count, (span + 1) * each), lanes);
}

// a b + c d, of which one product is rounded.
template <bool in_vector>
INLINE float sum_of_products(float a, float b, float c, float d) {
  return in_vector ? std::fma(c, d, a * b) : std::fma(a, b, c * d);
}

// Interpolation from a to b by `part` of the way b - a.
INLINE float between(float a, float b, float part) {
  return std::fabs(part) < 0.5f ? std::fma(part, b - a, a) : std::fma(part - 1.0f, b - a, b);
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

template <Decay decay>
struct Adam {
  float *__restrict w, *__restrict m, *__restrict v;
  const float* __restrict g;
  AdamNumbers by;
  const float reciprocal = 1.0f / by.root;

  template <bool in_vector>
  INLINE void element(int64_t i) const {
    float weight = w[i], grad = g[i];
    if (decay == kOfWeights) weight *= by.shrink;
    if (decay == kOfGradient) grad = std::fma(weight, by.decay, grad);
    m[i] = between(m[i], grad, by.first_rest);
    v[i] = sum_of_products<in_vector>(v[i], by.beta2, by.second_rest * grad, grad);
    w[i] = weight + -by.step_size * m[i] / (divided(std::sqrt(v[i]), by.root, reciprocal) + by.eps);
  }
};

template <Decay decay>
void adam(float* w, const float* g, float* m, float* v, int64_t count, const AdamNumbers& by, int64_t threads,
          int64_t lanes) {
  update(Adam<decay>{w, m, v, g, by}, count, threads, lanes);
}

struct LionNumbers {
  float lr, shrink, direction_rest, momentum_rest;
};

struct Lion {
  float *__restrict w, *__restrict m;
  const float* __restrict g;
  LionNumbers by;

  template <bool in_vector>
  INLINE void element(int64_t i) const {
    const float direction = between(m[i], g[i], by.direction_rest);
    const float sign = static_cast<float>(direction > 0.0f) - static_cast<float>(direction < 0.0f);
    m[i] = between(m[i], g[i], by.momentum_rest);
    w[i] = w[i] * by.shrink + -by.lr * sign;
  }
};

// 0 if an fp32 number with these bits, rounded to bf16, has the bits `narrow`; never for NaN, which has many.
INLINE uint32_t rounding_differs(uint32_t wide, uint32_t narrow) {
  const uint32_t rounded = (wide + 0x7fffu + (wide >> 16 & 1u)) >> 16;
  return (rounded ^ narrow) | static_cast<uint32_t>((wide & 0x7fffffffu) > 0x7f800000u);
}

uint32_t roundings_differ(const uint32_t* wide, const uint16_t* narrow, int64_t begin, int64_t end) {
  uint32_t differs = 0;
#pragma omp simd reduction(| : differs)
  for (int64_t i = begin; i < end; ++i) differs |= rounding_differs(wide[i], narrow[i]);
  return differs;
}

}  // namespace

// Each updates `count` elements in place with `threads` threads; `lanes` are the elements of torch's vectors.
extern "C" {

void trine_adam(float* w, const float* g, float* m, float* v, int64_t count, const AdamNumbers* by, int decay,
                int64_t threads, int64_t lanes) {
  const auto chosen = decay == kOfWeights ? adam<kOfWeights> : decay == kOfGradient ? adam<kOfGradient> : adam<kNone>;
  chosen(w, g, m, v, count, *by, threads, lanes);
}

void trine_lion(float* w, const float* g, float* m, int64_t count, const LionNumbers* by, int64_t threads) {
  update(Lion{w, m, g, *by}, count, threads, 1);
}

// Whether all of `wide`, fp32 by its bits, rounded to bf16 is `narrow`.
int trine_rounds_to(const uint32_t* wide, const uint16_t* narrow, int64_t count, int64_t threads) {
  const int64_t each = std::max<int64_t>(quotient_up(count, threads), kLine), spans = quotient_up(count, each);
  uint32_t differs = 0;
#pragma omp parallel for schedule(static, 1) reduction(| : differs) num_threads(static_cast<int>(threads)) if (spans > 1)
  for (int64_t span = 0; span < spans; ++span)
    differs |= roundings_differ(wide, narrow, span * each, std::min(count, (span + 1) * each));
  return !differs;
}

}  // extern "C"
