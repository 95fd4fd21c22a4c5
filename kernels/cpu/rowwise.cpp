// RMS normalisation and the activation of SwiGLU with their gradients, on a CPU in float32, a row of all tensors at a time:
// in torch's operations every step of them is a pass over tensors as large as the activations.
//
// Formulas: kernels/rowwise.py. Legend: R rows, D width.
#include "vector.h"

namespace {

// Rows whose contributions to the gradient of a weight are summed together, whoever works on them.
constexpr int64_t ROWS_OF_A_SUM = 256;

struct Norm {
  int64_t width;
  double eps;
  const float *x, *weight, *gate;  // [R, D], [D], [R, D] or null
  float* y;
  const float* dy;  // null: forward
  float *dx, *dweight, *dgate;  // [R, D], [ceil(R / ROWS_OF_A_SUM), D], [R, D]
};

struct Swiglu {
  int64_t width, step, dstep;        // numbers from one row of gate and up to the next, and of their gradients
  const float *gate, *up, *weight;   // [R, D] twice, [R] or null
  float* y;                          // [R, D]
  const float* dy;                   // null: forward
  float *dgate, *dup, *dweight;
};

void norm(const Norm& of, int64_t row, Workspace& work) {
  const int64_t D = of.width, at = row * D;
  const float *x = of.x + at, *w = of.weight, *gate = of.gate ? of.gate + at : nullptr;
  const float r = 1.0f / std::sqrt(dot(x, x, D) / D + float(of.eps));
  if (!of.dy) {
    map(D, of.y + at, [=](int64_t c, auto get) {
      const vec n = get(x + c) * r * get(w + c);
      return gate ? n * sigmoid(get(gate + c)) : n;
    });
    return;
  }
  // dn, the gradient of the normed row: gated.
  const float *dy = of.dy + at, *dn = dy;
  float* own = work.data();
  if (gate) {
    float* s = own + D;
    map(D, s, [=](int64_t c, auto get) { return sigmoid(get(gate + c)); });
    map(D, of.dgate + at, [=](int64_t c, auto get) {
      const vec g = get(s + c);
      return get(dy + c) * get(x + c) * r * get(w + c) * g * (1.0f - g);
    });
    map(D, own, [=](int64_t c, auto get) { return get(dy + c) * get(s + c); });
    dn = own;
  }
  float *sums = of.dweight + row / ROWS_OF_A_SUM * D, *dx = of.dx + at;
  map(D, sums, [=](int64_t c, auto get) { return get(sums + c) + get(dn + c) * get(x + c) * r; });
  // What lies along x changes nothing but its length, which the norm takes away.
  map(D, dx, [=](int64_t c, auto get) { return get(dn + c) * get(w + c); });
  const float along = dot(dx, x, D) * r * r / D;
  map(D, dx, [=](int64_t c, auto get) { return r * (get(dx + c) - get(x + c) * along); });
}

void swiglu(const Swiglu& of, int64_t row, Workspace& work) {
  const int64_t D = of.width;
  const float *gate = of.gate + row * of.step, *up = of.up + row * of.step, weight = of.weight ? of.weight[row] : 1.0f;
  float* y = of.y + row * D;
  if (!of.dy) {
    map(D, y, [=](int64_t c, auto get) { return silu(get(gate + c)) * get(up + c) * weight; });
    return;
  }
  const float* dy = of.dy + row * D;
  float *s = work.data(), *dgate = of.dgate + row * of.dstep, *dup = of.dup + row * of.dstep;
  map(D, s, [=](int64_t c, auto get) { return sigmoid(get(gate + c)); });
  map(D, dup, [=](int64_t c, auto get) { return get(dy + c) * weight * get(gate + c) * get(s + c); });
  map(D, dgate, [=](int64_t c, auto get) {
    const vec g = get(gate + c), sigma = get(s + c);
    return get(dy + c) * weight * get(up + c) * sigma * (1.0f + g * (1.0f - sigma));
  });
  // Weighted by the router, for the gradient of the next matrix; before that for the router's own.
  map(D, y, [=](int64_t c, auto get) { return get(gate + c) * get(s + c) * get(up + c); });
  if (!of.weight) return;
  of.dweight[row] = dot(dy, y, D);
  map(D, y, [=](int64_t c, auto get) { return get(y + c) * weight; });
}

}  // namespace

extern "C" {

// Rows first .. end - 1; gradients of a norm's weight are added to.
void norm_rows(const Norm* of, int64_t first, int64_t end) {
  Workspace work(2 * of->width);
  for (int64_t row = first; row < end; row++) norm(*of, row, work);
}
void swiglu_rows(const Swiglu* of, int64_t first, int64_t end) {
  Workspace work(of->width);
  for (int64_t row = first; row < end; row++) swiglu(*of, row, work);
}
}
