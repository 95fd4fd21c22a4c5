// Attention over residual sources with its gradient, on a CPU in float32: both phases, a row of all tensors at a time.
//
// Formulas: kernels/attnres/two_phase.py. In torch's operations every step of them is a pass over tensors as large as the
// activations; here a row's sources, mixtures and gradients are in the cache once.
//
// Legend: n sources, S queries, T rows, D width.
#include "vector.h"

namespace {

struct Residual {
  int64_t sources, queries, width;
  double eps;
  const float* const* v;     // n of [T, D]
  const float* qw;           // [S, D]
  float* const* o;           // S of [T, D]: mixtures
  float* const* lse;         // S of [T]
  const float* const* d_o;   // like o; null: forward
  const float* const* d_lse;
  float* const* dv;          // like v
  float* dqw;                // [ceil(T / ROWS_OF_A_SUM), S, D]
};

struct Merging {
  int64_t width;
  double eps;
  const float *o1, *lse, *partial, *qw;  // [T, D], [T], [T, D], [D]
  float* h;
  const float* dh;                       // null: forward
  float *d_o1, *d_lse, *dpartial, *dqw;  // the last [ceil(T / ROWS_OF_A_SUM), D]
};

// Rows whose contributions to a query's gradient are summed together, whoever works on them.
constexpr int64_t ROWS_OF_A_SUM = 256;

float norm(const float* x, int64_t width, double eps) { return 1.0f / std::sqrt(dot(x, x, width) / width + float(eps)); }

void mix(const Residual& of, int64_t row, Workspace& work) {
  const int64_t n = of.sources, S = of.queries, D = of.width, at = row * D;
  float *r = work.data(), *s = r + n, *p = s + S * n, *dp = p + S * n;
  for (int64_t i = 0; i < n; i++) {
    r[i] = norm(of.v[i] + at, D, of.eps);
    for (int64_t q = 0; q < S; q++) s[q * n + i] = dot(of.qw + q * D, of.v[i] + at, D) * r[i];
  }
  for (int64_t q = 0; q < S; q++) {
    const float largest = *std::max_element(s + q * n, s + q * n + n);
    float total = 0;
    for (int64_t i = 0; i < n; i++) total += p[q * n + i] = std::exp(s[q * n + i] - largest);
    for (int64_t i = 0; i < n; i++) p[q * n + i] /= total;
    if (of.d_o) continue;
    of.lse[q][row] = largest + std::log(total);
    map(D, of.o[q] + at, [&](int64_t c, auto get) {
      vec sum{};
      for (int64_t i = 0; i < n; i++) sum += p[q * n + i] * get(of.v[i] + at + c);
      return sum;
    });
  }
  if (!of.d_o) return;

  // dp becomes ds r, the coefficient of a query in a source's gradient and of a source in a query's.
  for (int64_t q = 0; q < S; q++) {
    float delta = -of.d_lse[q][row];
    for (int64_t i = 0; i < n; i++) {
      dp[q * n + i] = dot(of.d_o[q] + at, of.v[i] + at, D);
      delta += p[q * n + i] * dp[q * n + i];
    }
    for (int64_t i = 0; i < n; i++) dp[q * n + i] = p[q * n + i] * (dp[q * n + i] - delta) * r[i];
    map(D, of.dqw + (row / ROWS_OF_A_SUM * S + q) * D, [&](int64_t c, auto get) {
      vec sum = get(of.dqw + (row / ROWS_OF_A_SUM * S + q) * D + c);
      for (int64_t i = 0; i < n; i++) sum += dp[q * n + i] * get(of.v[i] + at + c);
      return sum;
    });
  }
  for (int64_t i = 0; i < n; i++) {
    float own = 0;
    for (int64_t q = 0; q < S; q++) own += dp[q * n + i] * s[q * n + i];
    own *= r[i] / D;
    map(D, of.dv[i] + at, [&](int64_t c, auto get) {
      vec sum = get(of.v[i] + at + c) * -own;
      for (int64_t q = 0; q < S; q++)
        sum += dp[q * n + i] * get(of.qw + q * D + c) + p[q * n + i] * get(of.d_o[q] + at + c);
      return sum;
    });
  }
}

void merge(const Merging& of, int64_t row) {
  const int64_t D = of.width, at = row * D;
  const float *o1 = of.o1 + at, *partial = of.partial + at;
  const float r = norm(partial, D, of.eps), s = dot(of.qw, partial, D) * r;
  const float share = 1.0f / (1.0f + std::exp(of.lse[row] - s)), rest = 1.0f / (1.0f + std::exp(s - of.lse[row]));
  if (!of.dh) {
    // Exact at both ends.
    map(D, of.h + at, [=](int64_t c, auto get) {
      const vec a = get(o1 + c), b = get(partial + c);
      return share < 0.5f ? a + share * (b - a) : b - rest * (b - a);
    });
    return;
  }
  const float* x = of.dh + at;
  const float ds = share * rest * (dot(x, partial, D) - dot(x, o1, D)), a = ds * r, own = a * r * s / D;
  of.d_lse[row] = -ds;
  map(D, of.d_o1 + at, [=](int64_t c, auto get) { return rest * get(x + c); });
  map(D, of.dpartial + at, [=](int64_t c, auto get) { return share * get(x + c) + a * get(of.qw + c) - own * get(partial + c); });
  add_scaled(of.dqw + row / ROWS_OF_A_SUM * D, a, partial, D);
}

}  // namespace

extern "C" {

// Rows first .. end - 1; gradients of queries are added to.
void residual_mix(const Residual* of, int64_t first, int64_t end) {
  Workspace work(of->sources * (1 + 3 * of->queries));
  for (int64_t row = first; row < end; row++) mix(*of, row, work);
}
void residual_merge(const Merging* of, int64_t first, int64_t end) {
  for (int64_t row = first; row < end; row++) merge(*of, row);
}
}
