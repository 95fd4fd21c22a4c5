// Vectors as wide as the processor's registers, their exponential, and a product with packed weights.
//
// Everything is written so that a row's bits depend on that row alone: sums over an inner dimension run in order, what is
// left over after whole vectors goes through the same code as whole ones, and no sum runs across rows.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512F__)
constexpr int WIDTH = 16, MOST_ROWS = 12;  // 24 of 32 registers hold sums
#elif defined(__AVX__)
constexpr int WIDTH = 8, MOST_ROWS = 6;  // 12 of 16
#else
constexpr int WIDTH = 4, MOST_ROWS = 6;
#endif
constexpr int PANEL = 2 * WIDTH;  // columns of a packed weight that lie together

typedef float vec __attribute__((vector_size(WIDTH * 4)));
typedef int32_t ivec __attribute__((vector_size(WIDTH * 4)));

static inline vec all(float x) { return x - vec{}; }
static inline vec load(const float* p) { vec v; memcpy(&v, p, sizeof v); return v; }
static inline void store(float* p, vec v) { memcpy(p, &v, sizeof v); }
static inline float sum(vec v) {  // halves added to halves
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector) && defined(__AVX512F__)
  v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  v += __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  return v[0];
#endif
#endif
  typedef float four __attribute__((vector_size(16)));
  four part[WIDTH / 4];
  memcpy(part, &v, sizeof v);
#pragma GCC unroll 2
  for (int half = WIDTH / 8; half; half /= 2)
    for (int i = 0; i < half; i++) part[i] += part[i + half];
  return (part[0][0] + part[0][2]) + (part[0][1] + part[0][3]);
}

// Zeros where a vector's address is a multiple of its size: one that lies across two lines of the cache is read twice.
struct Workspace {
  std::vector<vec> held;
  explicit Workspace(int64_t n) : held((n + WIDTH - 1) / WIDTH) {}
  float* data() { return reinterpret_cast<float*>(held.data()); }
  const float* data() const { return reinterpret_cast<const float*>(held.data()); }
  float& operator[](int64_t i) { return data()[i]; }
  float* begin() { return data(); }
  float* end() { return data() + held.size() * WIDTH; }
};

// e^x to two units in the last place for -87 <= x <= 88, and the value at the border beyond: x = n ln 2 + r, |r| <= ln 2 / 2,
// the series of e^r up to r^7 / 7!. NaN stays NaN.
static inline vec exp(vec x) {
  x = x < all(-87.0f) ? all(-87.0f) : x;
  x = x > all(88.0f) ? all(88.0f) : x;
  const vec shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const vec n = (x * 1.44269504f + shift) - shift;
  const vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts, the first exact in few bits
  vec y = all(1.0f / 5040);
  y = y * r + 1.0f / 720;
  y = y * r + 1.0f / 120;
  y = y * r + 1.0f / 24;
  y = y * r + 1.0f / 6;
  y = y * r + 0.5f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
  const ivec exponent = (__builtin_convertvector(n, ivec) + 127) << 23;
  vec power;
  memcpy(&power, &exponent, sizeof power);
  return y * power;
}

static inline vec sigmoid(vec x) { return 1.0f / (1.0f + exp(-x)); }
static inline vec silu(vec x) { return x * sigmoid(x); }

// 2 artanh(z) = 2 (z + z^3 / 3 + z^5 / 5 + ...)
template <int TERMS>
static inline vec twice_artanh(vec z) {
  const vec z2 = z * z;
  vec y = all(1.0f / (2 * TERMS - 1));
#pragma GCC unroll 8
  for (int term = TERMS - 1; term; term--) y = y * z2 + 1.0f / (2 * term - 1);
  return 2.0f * z * y;
}

// log(1 + e^x) = max(x, 0) + log(1 + t), t = e^-|x| in (0, 1], and log(1 + t) = 2 artanh(z) with z = t / (2 + t) <= 1/3.
static inline vec softplus(vec x) {
  const vec t = exp(x < 0.0f ? x : -x);
  return (x < 0.0f ? vec{} : x) + twice_artanh<8>(t / (2.0f + t));
}

// log x of normal numbers: x = 2^e m, sqrt(1/2) <= m < sqrt(2), log m = 2 artanh(z) with z = (m - 1) / (m + 1), |z| < 0.172.
static inline vec log(vec x) {
  ivec bits;
  memcpy(&bits, &x, sizeof bits);
  const ivec e = (bits - 0x3F3504F3) >> 23;
  bits -= e << 23;
  vec m;
  memcpy(&m, &bits, sizeof m);
  const vec f = m - 1.0f, n = __builtin_convertvector(e, vec);
  return n * 0.693359375f + (twice_artanh<6>(f / (2.0f + f)) - n * 2.12194440e-4f);
}

// log(1 - u) for 0 < u < 1: what rounding 1 - u has changed is put right by the slope of the logarithm.
static inline vec log_one_minus(vec u) {
  const vec w = 1.0f - u, d = 1.0f - w;
  return d == 0.0f ? -u : log(w) * (u / d);
}

// f(i, load) for every vector of 0 .. n - 1, what it returns stored at out + i; `load` fills up the last one with zeros.
template <class F>
static inline void map(int64_t n, float* out, F f) {
  int64_t i = 0;
  for (; i + WIDTH <= n; i += WIDTH) store(out + i, f(i, [](const float* p) { return load(p); }));
  if (i == n) return;
  const size_t bytes = (n - i) * sizeof(float);
  const vec v = f(i, [bytes](const float* p) { vec v{}; memcpy(&v, p, bytes); return v; });
  memcpy(out + i, &v, bytes);
}

static inline float dot(const float* a, const float* b, int64_t n) {
  vec s0{}, s1{};
  int64_t i = 0;
  for (; i + 2 * WIDTH <= n; i += 2 * WIDTH) {
    s0 += load(a + i) * load(b + i);
    s1 += load(a + i + WIDTH) * load(b + i + WIDTH);
  }
  for (; i + WIDTH <= n; i += WIDTH) s0 += load(a + i) * load(b + i);
  float rest = 0;
  for (; i < n; i++) rest += a[i] * b[i];
  return sum(s0 + s1) + rest;
}

// y += a x
static inline void add_scaled(float* y, float a, const float* x, int64_t n) {
  map(n, y, [=](int64_t i, auto get) { return get(y + i) + a * get(x + i); });
}

// A weight [inner, columns] in panels [columns / PANEL, inner, PANEL], the last one filled up with zeros.
struct Matrix {
  const float* panels;
  int64_t inner, columns;
};

// One of several weights of one shape that lie one after the other.
static inline Matrix one_of(const Matrix& many, int64_t index) {
  const int64_t padded = (many.columns + PANEL - 1) / PANEL * PANEL;
  return {many.panels + index * padded * many.inner, many.inner, many.columns};
}

template <int ROWS>
static inline void tile(const float* x, int64_t step_x, const float* panel, int64_t inner, float* y, int64_t step_y,
                        int64_t columns, bool add) {
  vec s[ROWS][2] = {};
  for (int64_t k = 0; k < inner; k++) {
    const vec w0 = load(panel + k * PANEL), w1 = load(panel + k * PANEL + WIDTH);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const vec xk = all(x[r * step_x + k]);
      s[r][0] += xk * w0;
      s[r][1] += xk * w1;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) {
    float* out = y + r * step_y;
    if (columns >= PANEL) {
      store(out, add ? load(out) + s[r][0] : s[r][0]);
      store(out + WIDTH, add ? load(out + WIDTH) + s[r][1] : s[r][1]);
    } else {
      float last[PANEL];
      store(last, s[r][0]);
      store(last + WIDTH, s[r][1]);
      for (int64_t c = 0; c < columns; c++) out[c] = add ? out[c] + last[c] : last[c];
    }
  }
}

// y [rows, columns] = x [rows, inner] w, or += with `add`; rows lie step_x and step_y numbers apart.
static inline void multiply(int64_t rows, const float* x, int64_t step_x, const Matrix& w, float* y, int64_t step_y,
                            bool add = false) {
  const int64_t blocks = (rows + MOST_ROWS - 1) / MOST_ROWS;
  for (int64_t column = 0; column < w.columns; column += PANEL) {
    const float* panel = w.panels + column * w.inner;
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t first = rows * block / blocks, count = rows * (block + 1) / blocks - first;
      const float* from = x + first * step_x;
      float* to = y + first * step_y + column;
#define CASE(n) case n: if constexpr (n <= MOST_ROWS) tile<n>(from, step_x, panel, w.inner, to, step_y, w.columns - column, add); break;
      switch (count) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
      }
#undef CASE
    }
  }
}
