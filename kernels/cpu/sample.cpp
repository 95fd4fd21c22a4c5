// Choosing tokens, row by row, on a CPU: model/engine/requests.py says what is chosen and why; here it is one or two passes
// over a row instead of some thirty over the batch. A row's bits depend on that row alone.
#include "vector.h"
#include <numeric>

namespace {

typedef uint32_t uvec __attribute__((vector_size(WIDTH * 4)));

struct Sampling {
  int64_t vocabulary, drawn, known;  // known: log-probabilities are wanted
  const float* logits;                     // [rows, V]
  const int64_t *keys, *positions;         // [rows]
  const float *temperature, *top_p, *min_p;
  const int64_t* banned;                   // ids that no row may choose, or
  int64_t count;
  const uint8_t* masks;                    // [rows, V] what each may not
  double* out;                             // [3, rows]: ids, log-probabilities as drawn, of the untouched logits
  int64_t rows;
};

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;

uint64_t splitmix(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
  x = (x ^ x >> 27) * 0x94D049BB133111EB;
  return x ^ x >> 31;
}

uvec mixed(uvec x) {
  x ^= x >> 16;
  x *= 0x7FEB352D;
  x ^= x >> 15;
  x *= 0x846CA68B;
  return x ^ x >> 16;
}

// Gumbel noise of some tokens for the two words of a row's position.
vec gumbel(uint32_t low, uint32_t high, ivec tokens) {
  const uvec x = mixed(mixed((uvec)tokens * 0x9E3779B9 + low) ^ high) & 0x7FFFFFFF;
  vec u = (__builtin_convertvector((ivec)x, vec) + 0.5f) * 4.656612873077393e-10f;  // 2^-31
  u = u > 0.99999994f ? all(0.99999994f) : u;                                          // 1 - 2^-24
  return -log(-log_one_minus(u));
}

vec some(const float* x, int64_t i, int64_t n) {  // x[i ..], -inf from n on
  if (i + WIDTH <= n) return load(x + i);
  vec v = all(-INFINITY);
  memcpy(&v, x + i, (n - i) * sizeof(float));
  return v;
}

float largest(const float* x, int64_t n) {
  vec tops = all(-INFINITY);
  for (int64_t i = 0; i < n; i += WIDTH) {
    const vec v = some(x, i, n);
    tops = v > tops ? v : tops;
  }
  float top = tops[0];
  for (int i = 1; i < WIDTH; i++) top = std::max(top, tops[i]);
  return top;
}

// log sum e^x; -inf counts nothing
double log_sum(const float* x, int64_t n, float top) {
  double total = 0;
  for (int64_t start = 0; start < n; start += 64 * WIDTH) {
    vec sums{};
    const int64_t end = std::min(n, start + 64 * WIDTH);
    for (int64_t i = start; i < end; i += WIDTH) {
      const vec v = some(x, i, n);
      sums += v == all(-INFINITY) ? vec{} : exp(v - top);
    }
    total += sum(sums);
  }
  return top + std::log(total);
}

// -inf for what lies outside the smallest set of likeliest tokens whose mass reaches p (of equals smaller ids first).
void keep_nucleus(float* x, const float* scaled, int64_t n, float p, float top) {
  std::vector<double> mass(n);
  double total = 0;
  for (int64_t i = 0; i < n; i++) total += mass[i] = std::exp(double(scaled[i]) - top);
  std::vector<int64_t> ids(n);
  std::iota(ids.begin(), ids.end(), 0);
  const auto less_likely = [&](int64_t a, int64_t b) { return scaled[a] != scaled[b] ? scaled[a] < scaled[b] : a > b; };
  std::make_heap(ids.begin(), ids.end(), less_likely);
  auto end = ids.end();
  for (double before = 0; end != ids.begin() && before < p;) {
    std::pop_heap(ids.begin(), end, less_likely);
    before += mass[*--end] / total;
  }
  for (auto id = ids.begin(); id != end; id++) x[*id] = -INFINITY;
}

// The largest x + noise (the first of equals).
int64_t draw(const float* x, int64_t n, bool noisy, uint64_t word) {
  vec best = all(-INFINITY);
  ivec where{}, index;
  for (int i = 0; i < WIDTH; i++) index[i] = i;
  for (int64_t i = 0; i < n; i += WIDTH, index += WIDTH) {
    vec v = some(x, i, n);
    if (noisy) v += gumbel(uint32_t(word), uint32_t(word >> 32), index);
    where = v > best ? index : where;
    best = v > best ? v : best;
  }
  int64_t chosen = where[0];
  float top = best[0];
  for (int i = 1; i < WIDTH; i++)
    if (best[i] > top || (best[i] == top && where[i] < chosen)) top = best[i], chosen = where[i];
  return chosen;
}

}  // namespace

extern "C" int64_t sampling_size() { return sizeof(Sampling); }

extern "C" void sample(const Sampling* s, int64_t first, int64_t end) {
  const int64_t V = s->vocabulary;
  std::vector<float> scaled(V), limited;
  for (int64_t r = first; r < end; r++) {
    const float* raw = s->logits + r * V;
    std::copy_n(raw, V, scaled.begin());
    if (s->masks) {
      for (int64_t i = 0; i < V; i++)
        if (s->masks[r * V + i]) scaled[i] = -INFINITY;
    } else {
      for (int64_t i = 0; i < s->count; i++)
        if (uint64_t(s->banned[i]) < uint64_t(V)) scaled[s->banned[i]] = -INFINITY;
    }
    const bool noisy = s->drawn && s->temperature[r] != 0;
    if (noisy)
      for (float& x : scaled) x /= s->temperature[r];
    const float* from = scaled.data();
    float top = 0;
    if (s->drawn && (s->min_p[r] > 0 || s->top_p[r] < 1)) {
      limited = scaled;
      top = largest(scaled.data(), V);
      if (s->min_p[r] > 0)
        for (float& x : limited) x = x < top + std::log(s->min_p[r]) ? -INFINITY : x;
      if (s->top_p[r] < 1) keep_nucleus(limited.data(), scaled.data(), V, s->top_p[r], top);
      from = limited.data();
    }
    const int64_t id = draw(from, V, noisy, splitmix(uint64_t(s->keys[r]) + uint64_t(s->positions[r]) * GOLDEN));
    s->out[r] = double(id);
    s->out[s->rows + r] = s->out[2 * s->rows + r] = NAN;
    if (!s->known) continue;
    s->out[s->rows + r] = noisy ? from[id] - log_sum(from, V, largest(from, V)) : 0.0;
    s->out[2 * s->rows + r] = raw[id] - log_sum(raw, V, largest(raw, V));
  }
}
